"""The active region: a contiguous KV row per running turn, behind the cache interface of transformers' layers.

A task's KV is copied in once when its turn starts and out once when it ends; a step reads views, it never gathers.
Knows rows and positions; who sits in a row, and whether it may, is the engine's and `residency`'s business.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW_TOKENS = 64  # row lengths are rounded up to this: few distinct shapes, aligned attention masks
FIRST_ROWS = 8


class SlotCache:
    """KV of all layers: one tensor [layers, 2, rows, kv_heads, tokens, head_dim], grown by need and never shrunk.

    Use per forward: `select` rows and positions, run the layers with this object as `past_key_values`.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._max_rows = max_rows
        # Zeros, not empty: a masked position has weight 0, and 0 times a NaN of uninitialised memory is NaN.
        self._store = torch.zeros(layers, 2, 0, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._selected: tuple[slice, int] = (slice(0, 0), 0)
        self._index: tuple[Tensor, Tensor] | None = None

    def ensure(self, rows: int, tokens: int) -> None:
        """Make room for `rows` rows of `tokens` tokens each; contents stay."""
        layers, two, have_rows, heads, have_tokens, dim = self._store.shape
        if rows <= have_rows and tokens <= have_tokens:
            return
        new_rows = have_rows if rows <= have_rows else min(self._max_rows, max(rows, 2 * have_rows, FIRST_ROWS))
        new_tokens = have_tokens if tokens <= have_tokens else -(-tokens // WINDOW_TOKENS) * WINDOW_TOKENS
        store = self._store.new_zeros(layers, two, new_rows, heads, new_tokens, dim)
        store[:, :, :have_rows, :, :have_tokens] = self._store
        self._store = store

    def select(self, first_row: int, positions: Tensor, last_position: int) -> Tensor:
        """Choose where the next forward writes and what it sees.

        `positions` int64 [rows, width]: the KV positions of the tokens of rows `first_row`…; a repeated position is
        written with equal values. Returns `visible`, bool [rows, width, window]: positions up to each token's own.
        """
        rows, width = positions.shape
        window = min(-(-(last_position + 1) // WINDOW_TOKENS) * WINDOW_TOKENS, self._store.shape[4])
        index = torch.arange(first_row, first_row + rows, device=positions.device)
        self._index = (index[:, None].expand(rows, width).reshape(-1), positions.reshape(-1))
        self._selected = (slice(first_row, first_row + rows), window)
        return torch.arange(window, device=positions.device) <= positions[:, :, None]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """transformers' cache call: takes [rows, kv_heads, width, head_dim], returns views over the whole window."""
        assert self._index is not None
        rows, window = self._selected
        at_rows, at_positions = self._index
        store_keys, store_values = self._store[layer]
        heads, dim = keys.shape[1], keys.shape[3]
        store_keys[at_rows, :, at_positions] = keys.transpose(1, 2).reshape(-1, heads, dim)
        store_values[at_rows, :, at_positions] = values.transpose(1, 2).reshape(-1, heads, dim)
        return store_keys[rows, :, :window], store_values[rows, :, :window]

    def copy_out(self, row: int, tokens: int) -> Tensor:
        """The first `tokens` positions of a row: [layers, 2, kv_heads, tokens, head_dim], its own memory."""
        return self._store[:, :, row, :, :tokens].clone(memory_format=torch.contiguous_format)

    def copy_in(self, row: int, kv: Tensor, tokens: int) -> None:
        self._store[:, :, row, :, :tokens] = kv[:, :, :, :tokens]

    def move(self, source: int, target: int, tokens: int) -> None:
        self._store[:, :, target, :, :tokens] = self._store[:, :, source, :, :tokens]

    def clear(self, row: int) -> None:
        """Zero a row that may hold NaN, so that its next owner does not read it through the mask."""
        self._store[:, :, row] = 0


def attention_mask(visible: Tensor, query_groups: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [rows, 1, query_groups * width, window] for `slot_attention` from bool [rows, width, window]."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
    return mask[:, None] if visible.shape[1] == 1 else mask.repeat(1, query_groups, 1)[:, None]


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Grouped-query attention for transformers' attention registry; query [rows, heads, width, head_dim].

    The query heads that share a KV head are folded into the query axis: K and V are never repeated.
    """
    rows, heads, width, dim = query.shape
    folded = query.reshape(rows, key.shape[1], heads // key.shape[1] * width, dim)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, heads, width, dim).transpose(1, 2), None
