"""A transformers model over one `Row`: every token attends to its own path, and the last MLP runs only where needed.

Keeps I7: the hidden states are those of each sequence alone, up to rounding. For Qwen2, Qwen3 and Llama with full
attention and position-only rotations; a model of another kind is padded (`takes_rows`). Attention, a small part of the
work at the lengths of agent trajectories, runs over paths of like length as padded blocks, or on NVIDIA GPUs without
any padding. Knows nothing of losses or updates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tiderl.trainers.packing import Layout
from tiderl.trainers.padding import cut_by_length, padded_chunks
from tiderl.trainers.rows import Row, shared_rows

ATTENTION = "tiderl_rows"  # the name of `row_attention` in transformers' registry
POSITION_ROPES = ("default", "linear", "llama3", "yarn")  # a token's rotation depends on its position only
BLOCK_TOKENS, MIN_BLOCK_TOKENS = 1024, 256
"""Paths of like length are attended together, up to the first size (its keys and values fit a core's cache); below the
second a call costs more in overhead than the padding it would save."""
SHORTEST_FRACTION = 0.85
"""Within a block no path is shorter than this share of the longest, once the block is worth a call of its own."""
FLASH_CAPABILITY, FLASH_HEAD_DIM = (8, 0), 256  # what torch's variable-length attention needs, and its widest head


class Attend(Protocol):
    """Attention of a row's tokens, each over its path up to itself."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """query [N, heads, D]; key, value [N, kv_heads, D]. Returns [N, heads, D]."""


# ---- which models


def use_rows(model: Any) -> None:
    """Give the model row attention, where it is of a kind that rows are exact for. Without a row it stays as it was."""
    import transformers
    from transformers.masking_utils import sdpa_mask

    if is_exact_for(model.config):
        transformers.AttentionInterface.register(ATTENTION, row_attention)
        transformers.AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        model.set_attn_implementation(ATTENTION)


def takes_rows(model: Any) -> bool:
    """True after `use_rows`, where it had effect."""
    return bool(model.config._attn_implementation == ATTENTION)


def layout_for(model: Any, pad_id: int, max_call_tokens: int) -> Layout:
    """Rows where the model takes them, else padded chunks; of at most `max_call_tokens` tokens."""
    if takes_rows(model):
        return partial(shared_rows, max_row_tokens=max_call_tokens)
    return partial(padded_chunks, pad_id=pad_id, max_chunk_tokens=max_call_tokens)


def is_exact_for(config: Any) -> bool:
    """A window would have to be cut from each path, and some rotations depend on the longest sequence of a call."""
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return not windowed and rope in POSITION_ROPES


# ---- the forward


def row_hidden_states(model: Any, row: Row, device: torch.device, compute_dtype: torch.dtype) -> Tensor:
    """The last hidden states that predict loss-bearing tokens: [U, hidden], see `Targets`.

    Only these go through the last layer's MLP: nothing else reads what it makes.
    """
    base = model.base_model
    predictors = torch.from_numpy(row.targets.predictors).to(device)
    positions = torch.from_numpy(row.positions).to(device)[None]
    hidden = base.embed_tokens(torch.from_numpy(row.ids).to(device))[None]
    shared = {
        "position_ids": positions,
        "position_embeddings": base.rotary_emb(hidden, positions),
        "attend": attend_paths(row, device, compute_dtype, _head_dim(model.config)),
        "attention_mask": None,
    }
    for layer in base.layers[:-1]:
        hidden = layer(hidden, **shared)
    last = base.layers[-1]
    attended, _ = last.self_attn(hidden_states=last.input_layernorm(hidden), **shared)
    needed = (hidden + attended)[0].index_select(0, predictors)
    needed = needed + last.mlp(last.post_attention_layernorm(needed))
    return base.norm(needed)


def row_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attend | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """For transformers' attention registry; query [1, heads, N, D]. Without `attend`, its ordinary attention."""
    if attend is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(query, key, value, scaling)[None], None


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


# ---- attention along paths


def attend_paths(row: Row, device: torch.device, compute_dtype: torch.dtype, head_dim: int) -> Attend:
    """The fastest attention over the row's paths that the device has."""
    varlen = _varlen_attention() if device.type == "cuda" and compute_dtype == torch.bfloat16 else None
    if varlen is None or head_dim > FLASH_HEAD_DIM or torch.cuda.get_device_capability(device) < FLASH_CAPABILITY:
        return PaddedBlocks(row, device)
    return FlashPaths(row, device, varlen)


@dataclass(frozen=True)
class _Block:
    """Paths of like length: [B, L], filled up on the right, where causal attention never lets a real token see."""

    paths: int
    gather: Tensor  # int64 [B * L], computed tokens
    own: Tensor  # int64, which of the B * L are a path's own tokens: what is taken from the result


class PaddedBlocks:
    """`Attend` on any device: padding lasts from the gathered keys to the attended values and no longer."""

    def __init__(self, row: Row, device: torch.device) -> None:
        counts = [len(path) for path in row.paths]
        self._blocks, owners = [], []
        for cut in cut_by_length(counts, BLOCK_TOKENS, MIN_BLOCK_TOKENS, SHORTEST_FRACTION):
            width = counts[cut[0]]
            gather, own = np.zeros((len(cut), width), np.int64), []
            for place, index in enumerate(cut):
                path, first_own = row.paths[index], counts[index] - row.own_tokens[index]
                gather[place, : len(path)] = path
                own.append(place * width + np.arange(first_own, len(path)))
                owners.append(path[first_own:])
            tensors = (torch.from_numpy(index).to(device) for index in (gather.reshape(-1), np.concatenate(own)))
            self._blocks.append(_Block(len(cut), *tensors))
        self._restore = torch.from_numpy(np.argsort(np.concatenate(owners))).to(device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        attended = []
        for block in self._blocks:
            queries, keys, values = (
                tensor.index_select(0, block.gather).unflatten(0, (block.paths, -1)).transpose(1, 2)
                for tensor in (query, key, value)
            )
            out = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True
            )
            attended.append(out.transpose(1, 2).flatten(0, 1).index_select(0, block.own))
        return torch.cat(attended).index_select(0, self._restore)


class FlashPaths:
    """`Attend` on NVIDIA GPUs: queries are the row as it is, keys the paths end to end; nothing is padded.

    A path's own tokens are its last, and variable-length attention aligns the causal mask at the end.
    """

    def __init__(self, row: Row, device: torch.device, varlen: Callable[..., Tensor]) -> None:
        self._varlen = varlen
        path_tokens = np.array([len(path) for path in row.paths])
        self._keys = torch.from_numpy(np.concatenate(row.paths)).to(device)
        self._ends = [_ends(counts, device) for counts in (row.own_tokens, path_tokens)]
        self._longest = (int(row.own_tokens.max()), int(path_tokens.max()))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)  # head norms return float32
        key, value = (tensor.index_select(0, self._keys) for tensor in (key, value))
        arguments = (query.contiguous(), key, value, *self._ends, *self._longest)
        return self._varlen(*arguments, scale=scaling, window_size=(-1, 0), enable_gqa=True)


def _ends(counts: np.ndarray, device: torch.device) -> Tensor:
    """0 and where each sequence ends. int32 [S + 1]"""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)).to(device)


def _varlen_attention() -> Callable[..., Tensor] | None:
    """torch's variable-length attention, where this torch has it with the arguments used here."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    accepted = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= set(accepted) else None
