"""The journal's writer: every state of a trajectory, group, update and version becomes a row, in order.

Keeps I1 and I2 on disk: what the rows say is what an outside audit reads and what a resumed run will believe.
An entry (one `append`) is atomic: a crash leaves all of its rows or none. Knows no SQL and no file.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiderl.data.records import Trajectory
from tiderl.runtime.buffer import Group, Member
from tiderl.runtime.ports import Blobs, Ledger, LedgerRow, PromptRow, TrajectoryRow, VersionRow


class Journal:
    """One method per thing that happens; all but `store` and `commit` only queue rows."""

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

    def retried(self, group: Group, member: Member) -> None:
        """The member starts again under the same trajectory id, as another attempt."""
        self.ledger.append([_row(group, member, "running")])

    def refilled(self, group: Group, dropped: Member, reason: str, new: Member) -> None:
        """One trajectory is dropped and another takes its place: one atomic entry, so no crash leaves a hole in the
        group."""
        self.ledger.append([_row(group, dropped, "dropped", reason), _row(group, new, "running")])

    def group_dropped(self, group: Group, reasons: Sequence[str]) -> None:
        """All members at once, each with its reason, by member: a group is dropped whole or not at all."""
        rows: list[LedgerRow] = [
            _row(group, member, "dropped", reason) for member, reason in zip(group.members, reasons, strict=True)
        ]
        self.ledger.append(rows)

    async def store(self, trajectory: Trajectory) -> str:
        """Stores the payload and returns its hash."""
        return await self.blobs.put(trajectory)

    def ready(self, group: Group, member: Member, sha256: str, updates_done: int) -> None:
        """The member's payload is stored, after this many updates."""
        self.ledger.append(
            [
                TrajectoryRow(
                    id=member.trajectory_id,
                    prompt_id=group.prompt_id,
                    member=member.number,
                    attempt=member.attempt,
                    status="ready",
                    sha256=sha256,
                    ready_update=updates_done,
                )
            ]
        )

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
