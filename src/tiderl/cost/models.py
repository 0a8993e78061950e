"""How large a model is: the shapes of published models, and the shape of a configured or downloaded one.

Sizes only, from which memory and cost follow: weights, KV of one position, arithmetic of one token. Nothing is loaded.
Knows no hardware and no seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tiderl.data.errors import ConfigurationError
from tiderl.data.scratch import MLP_WIDTH_FACTOR
from tiderl.data.settings import ModelSettings

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer that decide what it costs."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab_size: int
    tied_embeddings: bool = True
    dtype_bytes: int = 4
    other_parameters: int = 0
    """Weights outside the text stack, such as a vision tower's."""

    @property
    def parameters(self) -> int:
        """Weights of the embeddings, attention and feed-forward matrices; norms and biases are left out."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        feed_forward = 3 * self.hidden * self.feed_forward
        embeddings = self.vocab_size * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * (attention + feed_forward) + embeddings + self.other_parameters

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    def in_dtype(self, dtype: str) -> ModelShape:
        """The same sizes with weights and KV of `dtype`. Raises `ConfigurationError` for one without a size."""
        if dtype not in DTYPE_BYTES:
            raise ConfigurationError(
                f"no cost is known for the dtype {dtype!r}",
                where="train.dtype",
                hint=f"known: {', '.join(sorted(DTYPE_BYTES))}",
            )
        return replace(self, dtype_bytes=DTYPE_BYTES[dtype])

    @classmethod
    def scratch(cls, *, layers: int, hidden: int, heads: int, kv_heads: int, vocab_size: int) -> ModelShape:
        """A model that training starts from nothing, as `trainers` and `engines` build it."""
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hidden // heads,
            feed_forward=MLP_WIDTH_FACTOR * hidden,
            vocab_size=vocab_size,
        )

    @classmethod
    def of(cls, model: ModelSettings) -> ModelShape:
        """The shape of a configured policy. Raises `ConfigurationError` for a folder without `config.json`."""
        if model.path != "scratch":
            return cls.of_folder(Path(model.path)).in_dtype(model.dtype)
        return cls.scratch(
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            kv_heads=model.kv_heads,
            vocab_size=model.vocab_size,
        ).in_dtype(model.dtype)

    @classmethod
    def of_folder(cls, folder: Path) -> ModelShape:
        """The shape that a Hugging Face folder's `config.json` gives. Raises `ConfigurationError`."""
        file = folder / "config.json"
        try:
            return cls.of_config(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise ConfigurationError(
                f"no model shape can be read from {str(file)!r} ({type(error).__name__}: {error})",
                where="model.path",
                hint="name a Hugging Face folder with a config.json, or use path: scratch",
            ) from error

    @classmethod
    def of_config(cls, sizes: Mapping[str, object]) -> ModelShape:
        """The shape in the keys of a Hugging Face configuration. Raises `KeyError`, `TypeError`, `ValueError`."""

        def whole(key: str, otherwise: int | None = None) -> int:
            value = sizes.get(key) if otherwise is not None else sizes[key]
            if value is None and otherwise is not None:
                return otherwise
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{key} is {value!r}, not a positive whole number")
            return value

        heads, hidden = whole("num_attention_heads"), whole("hidden_size")
        return cls(
            layers=whole("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=whole("num_key_value_heads", heads),
            head_dim=whole("head_dim", hidden // heads),
            feed_forward=whole("intermediate_size"),
            vocab_size=whole("vocab_size"),
            tied_embeddings=bool(sizes.get("tie_word_embeddings", False)),
        )


def _published(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    feed_forward: int,
    vocab_size: int,
    *,
    tied: bool = False,
    other: int = 0,
) -> ModelShape:
    """bfloat16 and heads of 128, which all of the table have."""
    return ModelShape(layers, hidden, heads, kv_heads, 128, feed_forward, vocab_size, tied, 2, other)


QWEN3_VL_VISION_PARAMETERS = 415_000_000
"""24 layers of width 1,024 with the mergers behind them; the published total of the model is 4.4 B parameters."""

MODELS: Mapping[str, ModelShape] = {
    "Qwen2.5-7B": _published(28, 3584, 28, 4, 18944, 152_064),
    "Qwen2.5-14B": _published(48, 5120, 40, 8, 13824, 152_064),
    "Qwen2.5-32B": _published(64, 5120, 40, 8, 27648, 152_064),
    "Qwen3-8B": _published(36, 4096, 32, 8, 12288, 151_936),
    "Qwen3-VL-4B": _published(36, 2560, 32, 8, 9728, 151_936, tied=True, other=QWEN3_VL_VISION_PARAMETERS),
}
"""Published models by name. Source: the `config.json` of each model's public repository (Qwen on Hugging Face)."""


def named_model(name: str) -> ModelShape:
    """A shape of the table. Raises `ConfigurationError` with the list for another name."""
    if name not in MODELS:
        raise ConfigurationError(
            f"unknown model {name!r}", where="sim.model", hint=f"known: auto, {', '.join(sorted(MODELS))}"
        )
    return MODELS[name]
