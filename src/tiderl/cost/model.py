"""The cost model: seconds for every kind of work, one constants object for the simulator and the bounds.

An engine iteration with batch b, attended context C and P prefilled tokens takes
`iteration_s + sequence_s * b + context_token_s * C + prefill_token_s * P` seconds, and each sequence of the batch gains
one token. The trainer's work is proportional to its tokens. Knows no clock and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tiderl.data.errors import ConfigurationError
from tiderl.data.scratch import MLP_WIDTH_FACTOR
from tiderl.data.settings import ModelSettings

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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

    @property
    def parameters(self) -> int:
        """Weights of the embeddings, attention and feed-forward matrices; norms and biases are left out."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        feed_forward = 3 * self.hidden * self.feed_forward
        embeddings = self.vocab_size * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * (attention + feed_forward) + embeddings

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @classmethod
    def of(cls, model: ModelSettings) -> ModelShape:
        """The shape of a configured policy. Raises `ConfigurationError` for a folder without `config.json`."""
        dtype_bytes = _DTYPE_BYTES.get(model.dtype)
        if dtype_bytes is None:
            raise ConfigurationError(
                f"no cost is known for the dtype {model.dtype!r}",
                where="train.dtype",
                hint=f"known: {', '.join(sorted(_DTYPE_BYTES))}",
            )
        if model.path == "scratch":
            return cls(
                layers=model.layers,
                hidden=model.hidden,
                heads=model.heads,
                kv_heads=model.kv_heads,
                head_dim=model.hidden // model.heads,
                feed_forward=MLP_WIDTH_FACTOR * model.hidden,
                vocab_size=model.vocab_size,
                dtype_bytes=dtype_bytes,
            )
        return cls._of_folder(model.path, dtype_bytes)

    @classmethod
    def _of_folder(cls, path: str, dtype_bytes: int) -> ModelShape:
        file = Path(path) / "config.json"
        try:
            config = json.loads(file.read_text())
            heads = int(config["num_attention_heads"])
            hidden = int(config["hidden_size"])
            return cls(
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                feed_forward=int(config["intermediate_size"]),
                vocab_size=int(config["vocab_size"]),
                tied_embeddings=bool(config.get("tie_word_embeddings", False)),
                dtype_bytes=dtype_bytes,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"no model shape can be read from {str(file)!r} ({type(error).__name__}: {error})",
                where="model.path",
                hint="name a Hugging Face folder with a config.json, or use path: scratch",
            ) from error


@dataclass(frozen=True)
class CostModel:
    """Seconds per unit of work on one rank, and the limits of one replica."""

    iteration_s: float  # a0: any engine iteration
    sequence_s: float  # b0: per sequence that samples a token in it
    context_token_s: float  # g0: per context position that a decoding sequence attends to
    prefill_token_s: float  # cP: per token prefilled
    max_batch: int  # sequences in one iteration
    kv_capacity_tokens: int  # KV positions that a replica's memory can hold
    reference_token_s: float
    forward_token_s: float
    backward_token_s: float
    optimizer_s: float  # clip and step
    publish_s: float  # write one version's weights
    load_s: float  # read them into an engine
    swap_one_way_s: float  # one load of one model's weights onto a rank; a round trip is two
    checkpoint_s: float  # write weights and optimizer state
    weight_bytes: int

    @property
    def actor_token_s(self) -> float:
        """Forward and backward of one trained token."""
        return self.forward_token_s + self.backward_token_s

    def divided_among(self, ranks: int) -> CostModel:
        """The same with the trainer's token work spread evenly over `ranks`; the exchange of gradients is not
        modelled."""
        return replace(
            self,
            reference_token_s=self.reference_token_s / ranks,
            forward_token_s=self.forward_token_s / ranks,
            backward_token_s=self.backward_token_s / ranks,
        )


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator: its memory and what a model costs on it."""

    name: str
    memory_bytes: int
    cost: Callable[[ModelShape, int], CostModel]
    """(shape, memory_bytes) -> the cost model of one rank."""
