"""How large a model is, and how many KV tokens fit beside it: the arithmetic behind `kv_budget_tokens: auto`.

Estimates from sizes only; nothing is loaded and no machine is asked. A folder's sizes are read from its `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tiderl.config.schema import Config
from tiderl.data.errors import ConfigurationError
from tiderl.data.scratch import MLP_WIDTH_FACTOR

FAMILIES = ("qwen3", "qwen2", "llama")
SCRATCH_VOCABULARY = 512
"""More words than the environments of scratch models have; the embedding is a small part of such a model."""
TRAINER_BYTES_PER_PARAMETER = 16
"""float32 weights, gradients and AdamW's two moments."""
ACTIVATION_FLOATS_PER_LAYER = 34
"""Values of one hidden width that a transformer layer keeps for each token until the backward pass."""
USABLE_FRACTION = 0.8
"""Of a rank's memory: the rest is for the runtime, allocator slack and the environment's workers."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that memory and cost depend on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value


def model_shape(config: Config, folder: Path | None, *, refuse: Callable[..., ConfigurationError]) -> ModelShape:
    """The shape of `model:`, from `config.json` of its folder (None: `scratch`). `refuse(key, what, hint)` makes the
    error for a folder that is no model."""
    model = config.model
    if folder is None:
        return ModelShape(
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.hidden // model.heads,
            intermediate=MLP_WIDTH_FACTOR * model.hidden,
            vocabulary=SCRATCH_VOCABULARY,
        )
    try:
        sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if sizes["model_type"] not in FAMILIES:
            raise refuse(
                "model.path",
                f"models of the family {sizes['model_type']!r} are not yet supported",
                f"known: {', '.join(FAMILIES)}",
            )
        shape = ModelShape(
            layers=sizes["num_hidden_layers"],
            hidden=sizes["hidden_size"],
            heads=sizes["num_attention_heads"],
            kv_heads=sizes.get("num_key_value_heads") or sizes["num_attention_heads"],
            head_dim=sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"],
            intermediate=sizes["intermediate_size"],
            vocabulary=sizes["vocab_size"],
        )
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
) -> int:
    """KV tokens that one rank can hold beside its weights and, where it `trains_too`, the trainer's state."""
    width = 2 if dtype == "bfloat16" else 4
    used = float(shape.parameters * width)
    if trains_too:
        used += shape.parameters * (TRAINER_BYTES_PER_PARAMETER + (width if keeps_reference else 0))
        used += micro_batch_tokens * shape.layers * shape.hidden * ACTIVATION_FLOATS_PER_LAYER * width
    return max(0, int((USABLE_FRACTION * rank_bytes - used) // shape.kv_bytes_per_token(width)))
