"""A micro-batch as calls of the model: which tokens are computed, and where its loss-bearing tokens come out.

Two layouts: rows without padding (`rows.py`), else chunks with little of it (`padding.py`). Keeps I7: values are given
back in the micro-batch's flat order (`targets.py`). Pure numpy; knows nothing of models, losses or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tiderl.data.records import Sequence as TrainSequence
from tiderl.trainers.padding import Chunk
from tiderl.trainers.rows import Row
from tiderl.trainers.targets import Member, joined, useful_members

Layout = Callable[[Sequence[Member]], Sequence[Chunk | Row]]
"""Puts the members of a micro-batch into calls, each into one."""


@dataclass(frozen=True)
class Packed:
    """A micro-batch ready to compute. K = its loss-bearing tokens; flat order = sequence after sequence."""

    calls: tuple[Chunk | Row, ...]
    order: np.ndarray  # int64 [K]: the k-th loss-bearing token in flat order is the order[k]-th over the calls
    positions: np.ndarray  # int64 [K], index of each into the micro-batch's flat tokens
    lengths: np.ndarray  # int64 [sequences], loss-bearing tokens of each sequence
    tokens: int  # all real tokens

    @property
    def loss_tokens(self) -> int:
        return len(self.order)

    @property
    def computed_tokens(self) -> int:
        return sum(call.computed_tokens for call in self.calls)

    @property
    def padding_tokens(self) -> int:
        return sum(call.padding_tokens for call in self.calls)


def pack(sequences: Sequence[TrainSequence], layout: Layout) -> Packed:
    """Raises `InvariantViolation` where a first token bears loss: nothing predicts it."""
    calls = layout(useful_members(sequences))
    flat_mask = joined([sequence.loss_mask for sequence in sequences], bool)
    return Packed(
        calls=tuple(calls),
        order=np.argsort(joined([call.targets.places for call in calls], np.int64)),
        positions=np.flatnonzero(flat_mask),
        lengths=np.array([np.count_nonzero(sequence.loss_mask) for sequence in sequences], np.int64),
        tokens=len(flat_mask),
    )
