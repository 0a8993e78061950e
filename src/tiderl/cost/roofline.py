"""What a model costs on an accelerator: peaks times efficiency, bytes and operations counted from the model's shape.

A decoding iteration reads all weights once and each sequence's KV; prefill and training are bound by arithmetic, 2
operations a parameter and token forward, 4 backward. Attention's own arithmetic is left out: it is under 10 % below
8,192 tokens at these widths. Knows no names of the tables.
"""

from __future__ import annotations

from tiderl.cost.hardware import Accelerator, Efficiency
from tiderl.cost.model import CostModel
from tiderl.cost.models import ModelShape

MAX_BATCH = 256
"""Sequences in one iteration: the usual default of inference engines for these sizes."""
FORWARD_FLOPS, BACKWARD_FLOPS = 2, 4
"""Of one parameter and token; no recomputation of activations."""
GRADIENT_BYTES = 4
"""Gradients are exchanged in float32."""
STATE_BYTES = 14
"""Of one parameter in a checkpoint: bfloat16 weights, float32 master weights and two moments."""
CHECKPOINT_RANKS = 8
"""Ranks of one host that copy their share of the state to its memory; the way to a disk is in the background."""


def accelerator_cost(shape: ModelShape, device: Accelerator, efficiency: Efficiency) -> CostModel:
    """The cost of `shape` on one rank of `device`, where the whole model is on the rank."""
    weights, parameters = shape.weight_bytes, shape.parameters
    weight_read_s = weights / (device.memory_bytes_per_s * efficiency.weight_read_fraction)
    decode_s = FORWARD_FLOPS * parameters / (device.flops_per_s * efficiency.decode_compute_fraction)
    prefill_s = FORWARD_FLOPS * parameters / (device.flops_per_s * efficiency.prefill_compute_fraction)
    train_s = parameters / (device.flops_per_s * efficiency.train_compute_fraction)
    host_bytes_per_s = device.host_bytes_per_s * efficiency.host_copy_fraction
    network_bytes_per_s = efficiency.network_bytes_per_s
    room = device.memory_bytes * efficiency.memory_fraction - weights - efficiency.activation_bytes
    return CostModel(
        iteration_s=efficiency.iteration_host_s + weight_read_s,
        sequence_s=efficiency.sequence_host_s + decode_s,
        context_token_s=shape.kv_bytes_per_token / (device.memory_bytes_per_s * efficiency.kv_read_fraction),
        prefill_token_s=prefill_s,
        max_batch=MAX_BATCH,
        kv_capacity_tokens=max(0, int(room // shape.kv_bytes_per_token)),
        reference_token_s=FORWARD_FLOPS * train_s,
        forward_token_s=FORWARD_FLOPS * train_s,
        backward_token_s=BACKWARD_FLOPS * train_s,
        optimizer_s=GRADIENT_BYTES * parameters / network_bytes_per_s,
        publish_s=weights / network_bytes_per_s,
        load_s=weights / network_bytes_per_s,
        swap_one_way_s=weights / host_bytes_per_s,
        checkpoint_s=STATE_BYTES * parameters / (host_bytes_per_s * CHECKPOINT_RANKS),
        weight_bytes=weights,
        kv_reload_token_s=shape.kv_bytes_per_token / host_bytes_per_s,
    )
