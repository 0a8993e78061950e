"""The forward of a Qwen3, Qwen2 or Llama decoder over the slot cache, for sampling only: no gradients.

Its parameters keep their Hugging Face names, as views into fused matrices: one product for query, key and value, one
for gate and up. Knows shapes and numbers; nothing of files, turns or budgets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tiderl.engines.attention import SlotAttention

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """What the shapes of the parameters do not say."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float


@dataclass(frozen=True, slots=True)
class Layer:
    """The fused parameters of one layer; matrices are [out, in], as `F.linear` takes them."""

    attention_norm: Tensor
    qkv: Tensor  # rows: query heads, key heads, value heads
    qkv_bias: Tensor | None
    head_norms: Tensor | None  # [heads + kv_heads, head_dim]: of the query, then of the key
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Decoder:
    """`parameters` by Hugging Face name, to be written into; `forward` over rows of a slot cache."""

    def __init__(
        self,
        sizes: DecoderSizes,
        shapes: dict[str, tuple[int, ...]],
        rotations: tuple[Tensor, Tensor],
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        """`shapes`: of all parameters; no head means a tied one. `rotations`: cosine and sine, [positions, head_dim].

        Device and dtype are those of `rotations`. Parameters start uninitialised.
        """
        cos, sin = rotations
        self._sizes = sizes
        self._activation = activation
        half = sizes.head_dim // 2
        # Rotating halves (x1, x2) -> (-x2, x1) is a roll by one half; the sign goes into the table.
        self._cos, self._sin = cos[:, None], torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)[:, None]
        self.parameters: dict[str, Tensor] = {}
        self._shapes = shapes
        self._embedding = self._fused(EMBEDDING)
        self._layers = [self._layer(f"model.layers.{number}.") for number in range(sizes.layers)]
        self._norm = self._fused(NORM)
        self._head = self._fused(HEAD) if HEAD in shapes else self._embedding

    def _layer(self, prefix: str) -> Layer:
        def fused(form: str, *names: str) -> Tensor:
            return self._fused(*(prefix + form.format(name) for name in names))

        def optional(form: str, *names: str) -> Tensor | None:
            return fused(form, *names) if prefix + form.format(names[0]) in self._shapes else None

        projection, mlp = "self_attn.{}_proj.", "mlp.{}_proj."
        return Layer(
            attention_norm=fused("input_layernorm.weight", ""),
            qkv=fused(projection + "weight", "q", "k", "v"),
            qkv_bias=optional(projection + "bias", "q", "k", "v"),
            head_norms=self._head_norms(prefix + "self_attn.{}_norm.weight"),
            out=fused(projection + "weight", "o"),
            out_bias=optional(projection + "bias", "o"),
            mlp_norm=fused("post_attention_layernorm.weight", ""),
            gate_up=fused(mlp + "weight", "gate", "up"),
            gate_up_bias=optional(mlp + "bias", "gate", "up"),
            down=fused(mlp + "weight", "down"),
            down_bias=optional(mlp + "bias", "down"),
        )

    def _fused(self, *names: str) -> Tensor:
        """One tensor that holds these parameters one behind another along the first axis; each becomes a view."""
        rows = [self._shapes[name][0] for name in names]
        whole = self._cos.new_empty(sum(rows), *self._shapes[names[0]][1:])
        self.parameters |= zip(names, whole.split(rows), strict=True)
        return whole

    def _head_norms(self, form: str) -> Tensor | None:
        """Writing the [head_dim] weight of a family's head norm writes it for each of its heads."""
        names = form.format("q"), form.format("k")
        if names[0] not in self._shapes:
            return None
        sizes = self._sizes
        whole = self._cos.new_empty(sizes.heads + sizes.kv_heads, sizes.head_dim)
        self.parameters |= zip(names, whole.split([sizes.heads, sizes.kv_heads]), strict=True)
        return whole

    def forward(self, attention: SlotAttention, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits after each row's last token, in the model's dtype [rows, vocabulary]; writes the KV of all tokens.

        `ids`, `positions` int64 [rows, width]: those that `attention` was built for.
        """
        sizes, eps = self._sizes, self._sizes.norm_eps
        cos, sin = self._cos[positions.view(-1)], self._sin[positions.view(-1)]
        hidden = F.embedding(ids.view(-1), self._embedding)  # [tokens, hidden]
        for number, layer in enumerate(self._layers):
            query, kv = self._query_and_kv(layer, _rms_norm(hidden, layer.attention_norm, eps), cos, sin)
            attention.write(number, kv)
            if attention.width == 1:
                attended = attention.of_last(number, query)
            elif number < sizes.layers - 1:
                attended = attention.of_all(number, query, kv)
            else:
                # Of the other tokens only this layer's KV is wanted: their output is read by nothing.
                hidden, query = hidden[attention.last_tokens], query[attention.last_tokens]
                attended = attention.of_last(number, query)
            hidden = _add_linear(hidden, attended, layer.out, layer.out_bias)
            gate_up = F.linear(_rms_norm(hidden, layer.mlp_norm, eps), layer.gate_up, layer.gate_up_bias)
            gate, up = gate_up.chunk(2, dim=-1)
            hidden = _add_linear(hidden, self._activation(gate).mul_(up), layer.down, layer.down_bias)
        return F.linear(_rms_norm(hidden, self._norm, eps), self._head)

    def _query_and_kv(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] to rotated query [tokens, heads, head_dim] and KV [tokens, 2 * kv_heads, head_dim]."""
        heads, kv_heads, dim = self._sizes.heads, self._sizes.kv_heads, self._sizes.head_dim
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, dim)
        rotated = qk = qkv[:, : heads + kv_heads]
        if layer.head_norms is not None:
            qk = _rms_norm(qk, layer.head_norms, self._sizes.norm_eps)
        torch.addcmul(qk * cos, qk.roll(dim // 2, dims=-1), sin, out=rotated)
        return qkv[:, :heads], qkv[:, heads:]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis (arXiv:1910.07467). In half precision it rounds before the weight, like the families.

    `weight` [..., dim] has the trailing axes of `x`.
    """
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def _add_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x + y @ weight.T + bias; x, y [tokens, …]. In half precision the families round before they add: so does this."""
    if x.dtype != torch.float32 or bias is not None:
        return x + F.linear(y, weight, bias)
    return torch.addmm(x, y, weight.t())
