"""What the journal refuses, as pure functions: every trajectory ends once (I1) and is trained once (I2).

Shared by all ledgers, so that the simulated journal is as strict as the one on disk. Knows no storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from tiderl.data.errors import InvariantViolation
from tiderl.runtime.ports import LedgerRow, PromptRow, TrajectoryRow, VersionRow

R = TypeVar("R", PromptRow, VersionRow)

APPENDED = ("running", "ready", "dropped")
ENDED = ("trained", "dropped")


def check_append(rows: Sequence[LedgerRow]) -> None:
    """A row by itself. Raises `InvariantViolation` for a status that `append` may not give."""
    for row in rows:
        if not isinstance(row, TrajectoryRow):
            continue
        if row.status not in APPENDED:
            raise InvariantViolation(f"trajectory {row.id} cannot be appended as {row.status!r}: `commit` trains")
        if (row.status == "dropped") != (row.reason is not None):
            raise InvariantViolation(f"trajectory {row.id} is {row.status} with reason {row.reason!r}")
        if row.update_no is not None:
            raise InvariantViolation(f"trajectory {row.id} is {row.status} with update {row.update_no}")


def check_trajectory(earlier: TrajectoryRow | None, row: TrajectoryRow) -> None:
    """A row against the one that it replaces: an ended trajectory stays as it ended (I1)."""
    if earlier is None:
        return
    if earlier.status in ENDED and row != earlier:
        raise InvariantViolation(f"trajectory {row.id} ended as {earlier.status} and cannot become {row.status} (I1)")
    if (row.prompt_id, row.member) != (earlier.prompt_id, earlier.member):  # a retry keeps the id, not the attempt
        raise InvariantViolation(f"trajectory id {row.id} names two trajectories (I1)")


def check_once(earlier: R | None, row: R) -> None:
    """Prompts and versions are written once: a number never names two of them (I2)."""
    if earlier is not None and earlier != row:
        raise InvariantViolation(f"{row} contradicts {earlier} (I2)")


def check_commit(
    update: int, trajectory_ids: Sequence[int], last_update: int | None, statuses: Mapping[int, str]
) -> None:
    """May `update` train these trajectories? `statuses` holds the known ones among them (I2)."""
    if last_update is not None and update <= last_update:
        raise InvariantViolation(f"update {update} is not after the last committed one, {last_update} (I2)")
    if len(set(trajectory_ids)) != len(trajectory_ids):
        raise InvariantViolation(f"update {update} trains a trajectory twice (I2)")
    for trajectory in trajectory_ids:
        if statuses.get(trajectory) != "ready":
            status = statuses.get(trajectory, "unknown")
            raise InvariantViolation(f"update {update} would train trajectory {trajectory}, which is {status} (I2)")
