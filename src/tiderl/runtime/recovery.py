"""The journal's writer: every state of a trajectory, group, update and version becomes a row, in order.

Keeps I1 and I2 on disk: what the rows say is what an outside audit reads and what a resumed run will believe.
Knows no SQL and no file; the `Ledger` port does.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiderl.data.records import Trajectory
from tiderl.runtime.buffer import Group, Member
from tiderl.runtime.ports import Blobs, Ledger, PromptRow, TrajectoryRow, VersionRow


class Journal:
    """One method per thing that happens; all but `ready` and `commit` only queue rows."""

    def __init__(self, ledger: Ledger, blobs: Blobs) -> None:
        self.ledger, self.blobs = ledger, blobs

    def issued(self, group: Group) -> None:
        """A group started: its prompt, and every member's trajectory as running."""
        self.ledger.append(
            [
                PromptRow(group.prompt_id, group.prompt.id, group.prompt.seed, group.start_version),
                *(_row(group, member, "running") for member in group.members),
            ]
        )

    def restarted(self, group: Group, member: Member) -> None:
        """The member starts again: a retry (same id) or a refill (new id)."""
        self.ledger.append([_row(group, member, "running")])

    async def ready(self, group: Group, member: Member, trajectory: Trajectory) -> str:
        """Stores the payload, then says ready; returns the payload's hash."""
        sha256 = await self.blobs.put(trajectory)
        self.ledger.append(
            [
                TrajectoryRow(
                    id=member.trajectory_id,
                    prompt_id=group.prompt_id,
                    member=member.number,
                    attempt=member.attempt,
                    status="ready",
                    sha256=sha256,
                )
            ]
        )
        return sha256

    def dropped(self, group: Group, member: Member, reason: str) -> None:
        self.ledger.append([_row(group, member, "dropped", reason)])

    async def commit(self, update: int, batch: Sequence[Group]) -> None:
        """The update's trajectory ids, in the order in which they were consumed."""
        await self.ledger.commit(update, [m.trajectory_id for group in batch for m in group.members])

    def published(self, version: int) -> None:
        self.ledger.append([VersionRow(version=version, update_no=version)])


def _row(group: Group, member: Member, status: str, reason: str | None = None) -> TrajectoryRow:
    return TrajectoryRow(
        id=member.trajectory_id,
        prompt_id=group.prompt_id,
        member=member.number,
        attempt=member.attempt,
        status=status,
        reason=reason,
        sha256=member.sha256,
    )
