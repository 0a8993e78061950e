"""The active region: a contiguous KV row per running turn.

A task's KV is copied in once when its turn starts and out once when it ends; a step reads views, it never gathers.
Knows rows and positions; who sits in a row, and whether it may, is the engine's and `residency`'s business.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROOM_TOKENS = 64  # rows grow by multiples of this: each growth copies all of them
WINDOW_TOKENS = 16  # a step reads multiples of this: attention masks stay aligned, and little is read for nothing
FIRST_ROWS = 8


class SlotCache:
    """KV of all layers: one tensor [layers, 2, rows, kv_heads, tokens, head_dim], grown by need and never shrunk."""

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
        self._use(torch.zeros(layers, 2, 0, kv_heads, 0, head_dim, dtype=dtype, device=device))

    def _use(self, store: Tensor) -> None:
        layers, _, rows, heads, tokens, dim = store.shape
        self._store = store
        self._flat = store.view(layers, -1, dim)
        starts = torch.arange(0, 2 * rows * heads * tokens, max(tokens, 1), device=store.device)
        # int64 [rows, 2 * kv_heads]: where the head of a row begins in `_flat`, key heads first
        self._row_heads = starts.view(2, rows, heads).transpose(0, 1).reshape(rows, 2 * heads)
        self._viewed = (0, 0, 0)
        self._view: list[tuple[Tensor, Tensor]] = []

    @property
    def token_bytes(self) -> int:
        """Of the KV of one position."""
        layers, two, _, heads, _, dim = self._store.shape
        return layers * two * heads * dim * self._store.element_size()

    @property
    def dtype(self) -> torch.dtype:
        return self._store.dtype

    def ensure(self, rows: int, tokens: int) -> None:
        """Make room for `rows` rows of `tokens` tokens each; contents stay."""
        layers, two, have_rows, heads, have_tokens, dim = self._store.shape
        if rows <= have_rows and tokens <= have_tokens:
            return
        new_rows = have_rows if rows <= have_rows else min(self._max_rows, max(rows, 2 * have_rows, FIRST_ROWS))
        new_tokens = have_tokens if tokens <= have_tokens else -(-tokens // ROOM_TOKENS) * ROOM_TOKENS
        store = self._store.new_zeros(layers, two, new_rows, heads, new_tokens, dim)
        store[:, :, :have_rows, :, :have_tokens] = self._store
        self._use(store)

    def view(self, first_row: int, rows: int, last_position: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, [rows, kv_heads, window, head_dim]: positions up to `last_position` and some
        more. Views, valid until the next `ensure`; the same list while rows and window stay."""
        window = min(-(-(last_position + 1) // WINDOW_TOKENS) * WINDOW_TOKENS, self._store.shape[4])
        if (first_row, rows, window) != self._viewed:
            self._viewed = first_row, rows, window
            seen = self._store[:, :, first_row : first_row + rows, :, :window]
            self._view = [(keys, values) for keys, values in seen]
        return self._view

    def addresses(self, first_row: int, positions: Tensor) -> Tensor:
        """Where `write` puts the heads of tokens: int64 [rows * width * 2 * kv_heads] for `positions` [rows, width]."""
        rows = torch.arange(first_row, first_row + positions.shape[0], device=positions.device)
        return (self._row_heads[rows][:, None] + positions[:, :, None]).view(-1)

    def write(self, layer: int, addresses: Tensor, kv: Tensor) -> None:
        """Keep [rows * width, 2 * kv_heads, head_dim]; an address that repeats is written with equal values."""
        self._flat[layer].index_copy_(0, addresses, kv.reshape(-1, kv.shape[-1]))

    def write_start(self, layer: int, first_row: int, kv: Tensor) -> None:
        """Keep [rows, width, 2 * kv_heads, head_dim] at positions 0… of the rows."""
        rows, width, heads, dim = kv.shape
        target = self._store[layer, :, first_row : first_row + rows, :, :width]
        target.copy_(kv.view(rows, width, 2, heads // 2, dim).permute(2, 0, 3, 1, 4))

    def copy_out(self, row: int, tokens: int) -> Tensor:
        """The first `tokens` positions of a row: [layers, 2, kv_heads, tokens, head_dim], its own memory."""
        return self._store[:, :, row, :, :tokens].clone(memory_format=torch.contiguous_format)

    def copy_in(self, row: int, kv: Tensor, tokens: int) -> None:
        self._store[:, :, row, :, :tokens] = kv[:, :, :, :tokens]

    @staticmethod
    def shorten(kv: Tensor, tokens: int) -> Tensor:
        """The first `tokens` positions of what `copy_out` gave, in memory of their own."""
        return kv[:, :, :, :tokens].clone(memory_format=torch.contiguous_format)

    def move(self, source: int, target: int, tokens: int) -> None:
        self._store[:, :, target, :, :tokens] = self._store[:, :, source, :, :tokens]

    def clear(self, row: int) -> None:
        """Zero a row that may hold NaN, so that its next owner does not read it through the mask."""
        self._store[:, :, row] = 0
