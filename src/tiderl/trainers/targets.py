"""The loss-bearing tokens of a micro-batch: where they are, and what has to be computed for them.

Keeps I7: every loss-bearing token has a place in the micro-batch's own flat order, sequence after sequence, so how the
sequences are laid out for the model changes no result. Pure numpy; knows nothing of layouts, models or losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tiderl.data.errors import InvariantViolation
from tiderl.data.records import Sequence as TrainSequence


@dataclass(frozen=True)
class Member:
    """What is computed of one sequence: its tokens before the last loss-bearing one. What follows predicts nothing."""

    ids: np.ndarray  # int32 [T], never empty
    predictors: np.ndarray  # int64 [n], position that predicts each loss-bearing token: its own - 1
    targets: np.ndarray  # int32 [n], ids of the loss-bearing tokens
    places: np.ndarray  # int64 [n], of each in the micro-batch's flat order


@dataclass(frozen=True)
class Targets:
    """The loss-bearing tokens of one call of the model: N tokens, predicted by the hidden states of U computed ones.

    Several sequences may continue one computed token, so U is at most N.
    """

    predictors: np.ndarray  # int64 [U], indices of computed tokens, ascending
    predicted_by: np.ndarray  # int64 [N], index into `predictors`, ascending
    ids: np.ndarray  # int64 [N]
    places: np.ndarray  # int64 [N], in the micro-batch's flat order


def useful_members(sequences: Sequence[TrainSequence]) -> list[Member]:
    """The sequences that bear loss. Raises `InvariantViolation` where a first token does: nothing predicts it."""
    members, first_place = [], 0
    for sequence in sequences:
        positions = np.flatnonzero(sequence.loss_mask)
        if not len(positions):
            continue
        if positions[0] == 0:
            raise InvariantViolation(
                "the first token of a sequence bears loss", where=f"trajectory {sequence.trajectory_id}"
            )
        places = np.arange(first_place, first_place + len(positions))
        ids = np.ascontiguousarray(sequence.ids[: positions[-1]])
        members.append(Member(ids, positions - 1, sequence.ids[positions], places))
        first_place += len(positions)
    return members


def targets_at(members: Iterable[tuple[Member, np.ndarray]]) -> Targets:
    """`Targets` of a call that computes token t of a member as its computed token `index[t]`. Not of none."""
    pairs = list(members)
    predictors = np.concatenate([index[member.predictors] for member, index in pairs])
    order = np.argsort(predictors, kind="stable")
    unique, predicted_by = np.unique(predictors[order], return_inverse=True)
    ids, places = (
        np.concatenate(parts)[order] for parts in zip(*((m.targets, m.places) for m, _ in pairs), strict=True)
    )
    return Targets(unique, predicted_by, ids.astype(np.int64), places)


def loss_values(sequences: Sequence[TrainSequence], field: str, dtype: type[np.generic]) -> np.ndarray:
    """The per-token field (`logprobs`, `versions`) of the loss-bearing tokens, in flat order. [K]"""
    return joined([getattr(sequence, field)[sequence.loss_mask] for sequence in sequences], dtype)


def joined(arrays: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    """One array, also of none."""
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
