"""Padding-free packing: all sequences of a micro-batch in one row, and a beginning that several share only once.

A causal model's hidden state at a position depends on the ids up to it and on nothing else. So the members of a group,
which start alike, and trajectories that went the same way, are computed once as far as they agree, and their gradients
add up there: the same sums in another order (I7). Example, `a b c` and `a b d e`:

    ids        a b c d e
    positions  0 1 2 2 3
    paths      0 1 2  and  0 1 3 4

A token attends to its own path up to itself (`row_model.py`). Pure numpy; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiderl.trainers.targets import Member, Targets, targets_at


@dataclass(frozen=True)
class Row:
    """One call of the model, of N computed tokens, which no padding is among.

    `paths`: for each of S sequences the computed tokens that it consists of; the last `own_tokens` of them it is the
    first to have, at least one. The row is these own tokens, sequence after sequence.
    """

    ids: np.ndarray  # int64 [N]
    positions: np.ndarray  # int64 [N], of each token in its sequences
    paths: tuple[np.ndarray, ...]  # S times int64 [T], ascending
    own_tokens: np.ndarray  # int64 [S]
    targets: Targets
    padding_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        return len(self.ids)


def shared_rows(members: Sequence[Member], *, max_row_tokens: int) -> list[Row]:
    """As few rows as hold at most `max_row_tokens` tokens each, counted before they are shared, which bounds the memory
    of attention too; a longer single sequence is a row of its own."""
    # Sorted by bytes, sequences with the same beginning are neighbours: what one shares with any before it, it shares
    # with the one before it.
    rows: list[list[Member]] = []
    room = 0
    for member in sorted(members, key=lambda member: member.ids.tobytes()):
        if not rows or len(member.ids) > room:
            rows.append([])
            room = max_row_tokens
        rows[-1].append(member)
        room -= len(member.ids)
    return [_row(members) for members in rows]


def _row(members: Sequence[Member]) -> Row:
    """`members` are sorted by their ids."""
    computed = 0
    before, path = members[0].ids[:0], np.empty(0, np.int64)
    placed, ids, positions, paths, own_tokens = [], [], [], [], []
    for member in members:
        shared = shared_beginning(before, member.ids)
        own = len(member.ids) - shared
        path = np.concatenate([path[:shared], np.arange(computed, computed + own)])
        before, computed = member.ids, computed + own
        placed.append((member, path))
        if own:
            ids.append(member.ids[shared:])
            positions.append(np.arange(shared, len(path)))
            paths.append(path)
            own_tokens.append(own)
    return Row(
        ids=np.concatenate(ids).astype(np.int64),
        positions=np.concatenate(positions),
        paths=tuple(paths),
        own_tokens=np.array(own_tokens, np.int64),
        targets=targets_at(placed),
    )


def shared_beginning(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    both = min(len(one), len(other))
    differ = np.flatnonzero(one[:both] != other[:both])
    return int(differ[0]) if len(differ) else both
