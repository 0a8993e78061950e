"""One forward over rows of the slot cache: where its KV is written and what each of its tokens sees.

Built once a step, used by every layer; it reads views of the cache and never gathers. Query heads that share a KV head
are folded into the query axis, so K and V are never repeated. Knows no parameters and no turns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tiderl.engines.slot_cache import SlotCache


class SlotAttention:
    """`width` new tokens in each of `rows` rows; a token sees the positions of its row up to its own.

    Tokens are numbered row by row: token t of row r is r * width + t.
    """

    def __init__(self, cache: SlotCache, first_row: int, positions: Tensor, last_position: int, fresh: bool) -> None:
        """`positions` int64 [rows, width]: KV positions of the tokens of rows `first_row`…, none above `last_position`.

        A row shorter than `width` repeats its last token at its last position. `fresh`: every row starts at position 0,
        so that its tokens see only each other.
        """
        self.rows, self.width = rows, width = positions.shape
        self._first_row = first_row
        self._cache = cache
        self._fresh = fresh and width > 1
        self._seen = cache.view(first_row, rows, last_position)
        window = self._seen[0][0].shape[2]
        read = positions[:, -1:] if self._fresh else positions
        visible = torch.arange(window, device=positions.device) <= read[:, :, None]
        self._mask = torch.zeros(visible.shape, dtype=cache.dtype, device=positions.device)
        self._mask.masked_fill_(~visible, float("-inf"))  # [rows, width, or 1 where fresh, window]
        if width > 1:
            in_row = positions[:, -1] - positions[:, 0]
            self.last_tokens = in_row + torch.arange(0, rows * width, width, device=positions.device)
        if not self._fresh:
            self._write_at = cache.addresses(first_row, positions)

    def write(self, layer: int, kv: Tensor) -> None:
        """Keep [rows * width, 2 * kv_heads, head_dim], key heads first."""
        if self._fresh:
            # Behind a short row's end this leaves copies of its last token; they are overwritten before they are seen.
            self._cache.write_start(layer, self._first_row, kv.view(self.rows, self.width, *kv.shape[1:]))
        else:
            self._cache.write(layer, self._write_at, kv)

    def of_last(self, layer: int, query: Tensor) -> Tensor:
        """Attention of each row's last token; [rows, heads, head_dim] to [rows, heads * head_dim]."""
        keys, values = self._seen[layer]
        folded = query.view(self.rows, keys.shape[1], -1, query.shape[2])
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=self._mask[:, None, -1:]).flatten(1)

    def of_all(self, layer: int, query: Tensor, kv: Tensor) -> Tensor:
        """Attention of all tokens; [rows * width, heads, head_dim] to [rows * width, heads * head_dim].

        `kv` [rows * width, 2 * kv_heads, head_dim] is what was just written.
        """
        return self._of_fresh(query, kv) if self._fresh else self._of_continued(layer, query)

    def _of_fresh(self, query: Tensor, kv: Tensor) -> Tensor:
        """Plain causal attention: it skips what lies above the diagonal. A short row's end is wrong, and unread."""
        by_row = query.view(self.rows, self.width, *query.shape[1:]).transpose(1, 2)
        keys, values = kv.view(self.rows, self.width, *kv.shape[1:]).transpose(1, 2).chunk(2, dim=1)
        out = F.scaled_dot_product_attention(by_row, keys, values, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def _of_continued(self, layer: int, query: Tensor) -> Tensor:
        keys, values = self._seen[layer]
        kv_heads, dim = keys.shape[1], query.shape[2]
        groups = query.shape[1] // kv_heads
        by_row = query.view(self.rows, self.width, kv_heads, groups, dim).permute(0, 2, 3, 1, 4)
        folded = by_row.reshape(self.rows, kv_heads, groups * self.width, dim)
        mask = self._mask.repeat(1, groups, 1)[:, None]
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        return out.view(by_row.shape).permute(0, 3, 1, 2, 4).reshape(self.rows * self.width, -1)
