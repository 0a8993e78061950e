"""Length-sorted padding: sequences of like length as the rows of one call. For models that cannot take `rows.py`'s.

Padding is on the right. Causal attention then never lets a real token see it, so neither an attention mask nor position
ids are needed: a row's positions are 0, 1, 2 … as they were in the engine. Pure numpy; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiderl.trainers.targets import Member, Targets, targets_at

SHORTEST_FRACTION = 0.8
"""Within a chunk no row is shorter than this share of the longest, once the chunk is worth a model call of its own."""
MIN_CHUNK_TOKENS = 512
"""Below this a model call costs more in overhead than the padding it would save."""


@dataclass(frozen=True)
class Chunk:
    """Rows of similar length: one call of the model. Its computed tokens are numbered row after row."""

    ids: np.ndarray  # int64 [B, L], padded on the right
    targets: Targets
    padding_tokens: int

    @property
    def computed_tokens(self) -> int:
        return self.ids.size


def padded_chunks(
    members: Sequence[Member], *, pad_id: int, max_chunk_tokens: int, shortest_fraction: float = SHORTEST_FRACTION
) -> list[Chunk]:
    """Longest first, cut into chunks of at most `max_chunk_tokens` (a longer single sequence is one of its own).

    `shortest_fraction` 0 sorts nothing out: chunks are then as padded as a batch in one piece.
    """
    counts = [len(member.ids) for member in members]
    cuts = cut_by_length(counts, max_chunk_tokens, MIN_CHUNK_TOKENS, shortest_fraction)
    return [_chunk([members[i] for i in cut], pad_id) for cut in cuts]


def _chunk(members: Sequence[Member], pad_id: int) -> Chunk:
    width = len(members[0].ids)
    ids = np.full((len(members), width), pad_id, np.int64)
    for row, member in enumerate(members):
        ids[row, : len(member.ids)] = member.ids
    targets = targets_at((member, row * width + np.arange(width)) for row, member in enumerate(members))
    return Chunk(ids, targets, ids.size - sum(len(member.ids) for member in members))


def cut_by_length(
    token_counts: Sequence[int], max_tokens: int, min_tokens: int, shortest_fraction: float
) -> list[list[int]]:
    """Indices, longest first, cut where one more row would pass `max_tokens`, padding included, or where it is shorter
    than `shortest_fraction` of the longest and `min_tokens` are reached. Ties keep their order."""
    cuts: list[list[int]] = []
    for index in sorted(range(len(token_counts)), key=lambda i: -token_counts[i]):
        if cuts:
            rows, longest = len(cuts[-1]), token_counts[cuts[-1][0]]
            full = (rows + 1) * longest > max_tokens
            wasteful = token_counts[index] < shortest_fraction * longest and rows * longest >= min_tokens
        if not cuts or full or wasteful:
            cuts.append([])
        cuts[-1].append(index)
    return cuts
