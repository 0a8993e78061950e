"""The architecture of a `scratch` model: the one place where trainer and engine agree on its sizes.

Plain numbers for a Hugging Face Qwen3 configuration; knows no torch and no transformers.
"""

from __future__ import annotations

from typing import Any

from tiderl.data.errors import ConfigurationError
from tiderl.data.settings import ModelSettings

SCRATCH_MODEL_TYPE = "qwen3"
MLP_WIDTH_FACTOR = 3  # intermediate size / hidden size; Qwen3-0.6B has 3.0


def scratch_config(model: ModelSettings) -> dict[str, Any]:
    """Keyword arguments of `AutoConfig.for_model("qwen3", …)` for `model`: tied embeddings, full attention.

    Raises `ConfigurationError` when the head counts do not divide.
    """
    if model.hidden % model.heads or (model.hidden // model.heads) % 2 or model.heads % model.kv_heads:
        raise ConfigurationError(
            f"hidden {model.hidden}, heads {model.heads}, kv_heads {model.kv_heads} do not fit together",
            where="model",
            hint="hidden must be an even multiple of heads, and heads a multiple of kv_heads",
        )
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "intermediate_size": MLP_WIDTH_FACTOR * model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.hidden // model.heads,
        "max_position_embeddings": model.max_context_tokens,
        "tie_word_embeddings": True,
        "pad_token_id": model.pad_id,
        "bos_token_id": None,
        "eos_token_id": list(model.stop_ids),
    }
