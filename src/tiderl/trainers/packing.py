"""A micro-batch as padded chunks: which rows the model computes, and where its loss-bearing tokens are.

Keeps I7: every value of a token is addressed by its place in the micro-batch's own flat order, so how sequences are
sorted and cut into chunks changes no result. Pure numpy; knows nothing of models, losses or devices.

Padding is on the right. Causal attention then never lets a real token see it, so neither an attention mask nor position
ids are needed: a row's positions are 0, 1, 2 … as they were in the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tiderl.data.errors import InvariantViolation
from tiderl.data.records import Sequence as TrainSequence

SHORTEST_FRACTION = 0.8
"""Within a chunk no row is shorter than this share of the longest, once the chunk is worth a model call of its own."""
MIN_CHUNK_TOKENS = 512
"""Below this a model call costs more in overhead than the padding it would save."""


@dataclass(frozen=True)
class Chunk:
    """Rows of similar length: one call of the model."""

    ids: np.ndarray  # int64 [B, L], padded on the right
    rows: np.ndarray  # int64 [N], row of each loss-bearing token
    columns: np.ndarray  # int64 [N], column whose hidden state predicts it: its position - 1
    targets: np.ndarray  # int64 [N], its token id


@dataclass(frozen=True)
class Packed:
    """A micro-batch ready to compute. K = its loss-bearing tokens; flat order = sequence after sequence."""

    chunks: tuple[Chunk, ...]
    order: np.ndarray  # int64 [K]: the k-th loss-bearing token in flat order is the order[k]-th over the chunks
    positions: np.ndarray  # int64 [K], index of each into the micro-batch's flat tokens
    lengths: np.ndarray  # int64 [sequences], loss-bearing tokens of each sequence
    tokens: int  # all real tokens
    padded_tokens: int  # tokens that the model computes

    @property
    def loss_tokens(self) -> int:
        return len(self.order)


def pack(sequences: Sequence[TrainSequence], pad_id: int, max_chunk_tokens: int) -> Packed:
    """Sort by length, longest first, and cut into padded chunks of at most `max_chunk_tokens` (a longer single sequence
    is a chunk of its own). Raises `InvariantViolation` where a first token bears loss: nothing predicts it."""
    for sequence in sequences:
        if len(sequence.loss_mask) and sequence.loss_mask[0]:
            raise InvariantViolation(
                "the first token of a sequence bears loss", where=f"trajectory {sequence.trajectory_id}"
            )
    masks = [np.asarray(sequence.loss_mask, bool) for sequence in sequences]
    lengths = np.array([int(mask.sum()) for mask in masks], np.int64)
    first_loss_token = np.concatenate([[0], np.cumsum(lengths)])
    chunks, chunk_order = [], []
    for members in _cut([len(sequence.ids) for sequence in sequences], max_chunk_tokens):
        ids = np.full((len(members), len(sequences[members[0]].ids)), pad_id, np.int64)
        rows, columns, targets = [], [], []
        for row, index in enumerate(members):
            ids[row, : len(sequences[index].ids)] = sequences[index].ids
            positions = np.flatnonzero(masks[index])
            rows.append(np.full(len(positions), row, np.int64))
            columns.append(positions - 1)
            targets.append(sequences[index].ids[positions])
            chunk_order.append(np.arange(first_loss_token[index], first_loss_token[index + 1]))
        chunks.append(Chunk(ids, *(_joined(parts, np.int64) for parts in (rows, columns, targets))))
    flat_mask = _joined(masks, bool)
    return Packed(
        chunks=tuple(chunks),
        order=np.argsort(_joined(chunk_order, np.int64)),
        positions=np.flatnonzero(flat_mask),
        lengths=lengths,
        tokens=len(flat_mask),
        padded_tokens=sum(chunk.ids.size for chunk in chunks),
    )


def loss_values(sequences: Sequence[TrainSequence], field: str, dtype: type[np.generic]) -> np.ndarray:
    """The per-token field (`logprobs`, `versions`) of the loss-bearing tokens, in flat order. [K]"""
    return _joined([getattr(sequence, field)[sequence.loss_mask] for sequence in sequences], dtype)


def _cut(token_counts: Sequence[int], max_chunk_tokens: int) -> list[list[int]]:
    """Indices of the non-empty sequences, longest first, cut into chunks. Ties keep their order."""
    chunks: list[list[int]] = []
    for index in sorted(range(len(token_counts)), key=lambda i: -token_counts[i]):
        if token_counts[index] == 0:
            continue
        if not chunks or _is_closed(chunks[-1], token_counts, index, max_chunk_tokens):
            chunks.append([])
        chunks[-1].append(index)
    return chunks


def _is_closed(chunk: list[int], token_counts: Sequence[int], index: int, max_chunk_tokens: int) -> bool:
    """True where sequence `index`, no longer than any in the chunk, should open a new one."""
    rows, longest = len(chunk), token_counts[chunk[0]]
    full = (rows + 1) * longest > max_chunk_tokens
    wasteful = token_counts[index] < SHORTEST_FRACTION * longest and rows * longest >= MIN_CHUNK_TOKENS
    return full or wasteful


def _joined(arrays: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    """One array, also of none."""
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
