"""How many KV tokens fit beside a model: the arithmetic behind `kv_budget_tokens: auto`.

Estimates from sizes only; nothing is loaded and no machine is asked. A folder's sizes are read from its `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tiderl.config.schema import Config
from tiderl.cost.models import ModelShape
from tiderl.data.errors import ConfigurationError

FAMILIES = ("qwen3", "qwen2", "llama")
SCRATCH_VOCABULARY = 512
"""More words than the environments of scratch models have; the embedding is a small part of such a model."""
TRAINER_BYTES_PER_PARAMETER = 16
"""float32 weights, gradients and AdamW's two moments."""
ACTIVATION_FLOATS_PER_LAYER = 34
"""Values of one hidden width that a transformer layer keeps for each token until the backward pass."""
VLLM_BYTES = 768 * 2**20
"""What vLLM's own code and buffers take beside weights and KV: its process on a CPU, `rollout.engine: vllm`."""
USABLE_FRACTION = 0.8
"""Of a rank's memory: the rest is for the runtime, allocator slack and the environment's workers."""


def model_shape(config: Config, folder: Path | None, *, refuse: Callable[..., ConfigurationError]) -> ModelShape:
    """The shape of `model:`, from `config.json` of its folder (None: `scratch`). `refuse(key, what, hint)` makes the
    error for a folder that is no model."""
    model = config.model
    if folder is None:
        return ModelShape.scratch(
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            kv_heads=model.kv_heads,
            vocab_size=SCRATCH_VOCABULARY,
        )
    try:
        sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if sizes["model_type"] not in FAMILIES:
            raise refuse(
                "model.path",
                f"models of the family {sizes['model_type']!r} are not yet supported",
                f"known: {', '.join(FAMILIES)}",
            )
        shape = ModelShape.of_config(sizes)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise refuse("model.path", f"{folder / 'config.json'} is no model description ({error!r})") from None
    positions, context = sizes.get("max_position_embeddings"), config.rollout.max_context_tokens
    if positions is not None and positions < context:
        raise refuse(
            "rollout.max_context_tokens",
            f"{context} is more than the {positions} positions of {model.path}",
            f"give at most {positions}",
        )
    return shape


def kv_tokens_in_memory(
    shape: ModelShape,
    *,
    rank_bytes: float,
    dtype: str,
    trains_too: bool,
    keeps_reference: bool,
    micro_batch_tokens: int,
    engine: str = "torch",
) -> int:
    """KV tokens that one rank can hold beside its weights and, where it `trains_too`, the trainer's state."""
    shape = shape.in_dtype(dtype)
    used = float(shape.weight_bytes) + (VLLM_BYTES if engine == "vllm" else 0)
    if trains_too:
        reference_bytes = shape.dtype_bytes if keeps_reference else 0
        used += shape.parameters * (TRAINER_BYTES_PER_PARAMETER + reference_bytes)
        floats = micro_batch_tokens * shape.layers * shape.hidden * ACTIVATION_FLOATS_PER_LAYER
        used += floats * shape.dtype_bytes
    return max(0, int((USABLE_FRACTION * rank_bytes - used) // shape.kv_bytes_per_token))
