"""One core of a small AVX-512 server CPU, one torch thread, float32: constants committed here, never measured at start.

Two models were measured with the embedded engine's kind of loop and the torch trainer (medians of clean runs, spread
about 30 %): 0.92 M and 5.77 M parameters. Decode constants are least squares over batches of 1 to 64 and contexts of
96 to 1,088 tokens (residuals at most 8 %). A model of another size lies on the power law through the two points.
"""

from __future__ import annotations

import math

from tiderl.cost.model import CostModel
from tiderl.cost.models import ModelShape

# Parameters of the two measured models.
TINY_PARAMETERS = 917_504
SMALL_PARAMETERS = 5_767_168

# (tiny, small), seconds. Decode, tokens/s at batch 1, 8, 32, 64: 925, 4,338, 8,590, 10,240; 359, 1,384, 2,338, 2,615.
ITERATION_S = (1.04e-3, 2.52e-3)
SEQUENCE_S = (6.2e-5, 2.9e-4)
PREFILL_TOKEN_S = (1 / 21_000, 1 / 6_250)
# 32 x 512 tokens: forward 0.65 s, backward 1.18 s (tiny); 7.65 s together (small), split in the same proportion.
FORWARD_TOKEN_S = (0.65 / 16_384, 2.72 / 16_384)
BACKWARD_TOKEN_S = (1.18 / 16_384, 4.93 / 16_384)
OPTIMIZER_S = (4.5e-3, 17.3e-3)

# Attention reads this long per context position and byte of KV in it (tiny: 2,048 bytes a position).
CONTEXT_S_PER_KV_BYTE = 2.2e-7 / 2_048

# Weights through a safetensors file in memory: 10 MB 4.2 / 3.0 ms, 200 MB 75.6 / 86.2 ms.
PUBLISH_S_PER_BYTE = 3.8e-10
LOAD_S_PER_BYTE = 4.3e-10
FILE_S = 5.0e-4

# A checkpoint goes to disk: 200 MB in 0.54 s. Weights and two optimizer moments.
DISK_S_PER_BYTE = 2.7e-9
CHECKPOINT_COPIES = 3

MEMORY_BYTES = 8 << 30
MAX_BATCH = 256
KV_MEMORY_FRACTION = 0.5  # the rest: weights, activations, the process


def this_cpu(shape: ModelShape, memory_bytes: int) -> CostModel:
    """The cost of `shape` on one core with `memory_bytes` of memory."""
    octaves = math.log(shape.parameters / TINY_PARAMETERS) / math.log(SMALL_PARAMETERS / TINY_PARAMETERS)

    def scaled(points: tuple[float, float]) -> float:
        tiny, small = points
        return tiny * (small / tiny) ** octaves

    forward_token_s = scaled(FORWARD_TOKEN_S)
    kv_bytes = KV_MEMORY_FRACTION * max(0, memory_bytes - 2 * shape.weight_bytes)
    return CostModel(
        iteration_s=scaled(ITERATION_S),
        sequence_s=scaled(SEQUENCE_S),
        context_token_s=CONTEXT_S_PER_KV_BYTE * shape.kv_bytes_per_token,
        prefill_token_s=scaled(PREFILL_TOKEN_S),
        max_batch=MAX_BATCH,
        kv_capacity_tokens=int(kv_bytes // shape.kv_bytes_per_token),
        reference_token_s=forward_token_s,
        forward_token_s=forward_token_s,
        backward_token_s=scaled(BACKWARD_TOKEN_S),
        optimizer_s=scaled(OPTIMIZER_S),
        publish_s=FILE_S + PUBLISH_S_PER_BYTE * shape.weight_bytes,
        load_s=FILE_S + LOAD_S_PER_BYTE * shape.weight_bytes,
        swap_one_way_s=0.0,  # reference and actor both stay in the same memory
        checkpoint_s=FILE_S + DISK_S_PER_BYTE * CHECKPOINT_COPIES * shape.weight_bytes,
        weight_bytes=shape.weight_bytes,
    )
