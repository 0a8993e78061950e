"""The journal in memory, as strict as the one on disk, and able to crash: for virtual time (I1, I2).

A log of transactions from which the state is derived, so that a reopened ledger is a prefix of what was written, as a
database is after a crash. Knows no clock and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiderl.data.errors import CheckpointError
from tiderl.runtime.ports import CheckpointRow, LedgerRow, PromptRow, Replay, TrajectoryRow, VersionRow
from tiderl.store.rules import check_append, check_commit, check_once, check_trajectory


@dataclass(frozen=True)
class Transaction:
    """One atomic write: rows, or an update, or a durable checkpoint."""

    rows: tuple[LedgerRow, ...] = ()
    update: int | None = None
    trajectory_ids: tuple[int, ...] = ()
    checkpoint: CheckpointRow | None = None


class MemoryLedger:
    """The `Ledger` of a simulated run. `log` makes one that starts with earlier transactions."""

    def __init__(self, log: Sequence[Transaction] = ()) -> None:
        self._log: list[Transaction] = []
        self._prompts: dict[int, PromptRow] = {}
        self._trajectories: dict[int, TrajectoryRow] = {}
        self._updates: dict[int, tuple[int, ...]] = {}
        self._versions: dict[int, VersionRow] = {}
        self._checkpoints: dict[str, CheckpointRow] = {}
        self._closed = False
        for transaction in log:
            self._apply(transaction)

    def append(self, rows: Sequence[LedgerRow]) -> None:
        self._check()
        check_append(rows)
        self._apply(Transaction(rows=tuple(rows)))

    async def commit(self, update: int, trajectory_ids: Sequence[int]) -> None:
        self._check()
        self._apply(Transaction(update=update, trajectory_ids=tuple(trajectory_ids)))

    async def durable(self, checkpoint: CheckpointRow) -> None:
        self._check()
        self._apply(Transaction(checkpoint=checkpoint))

    async def replay(self) -> Replay:
        self._check()
        return Replay(
            prompts=tuple(self._prompts[number] for number in sorted(self._prompts)),
            trajectories=tuple(self._trajectories[number] for number in sorted(self._trajectories)),
            updates=tuple(sorted(self._updates.items())),
            versions=tuple(self._versions[number] for number in sorted(self._versions)),
            checkpoints=tuple(sorted(self._checkpoints.values(), key=lambda row: (row.update_no, row.checkpoint))),
        )

    async def close(self) -> None:
        self._closed = True

    def snapshot(self) -> tuple[Transaction, ...]:
        """Everything written so far; `MemoryLedger(snapshot)` goes on from there."""
        return tuple(self._log)

    def reopen(self, *, lose_tail_rows: int = 0, tear: bool = False) -> MemoryLedger:
        """The ledger as a crash leaves it. Whole transactions are lost from the end, until `lose_tail_rows` rows
        are gone; `tear` loses the last one, which was half written. What a durable checkpoint holds is never lost."""
        log = list(self._log)
        lost = 0
        if tear and log and log[-1].checkpoint is None:
            log.pop()
        while lost < lose_tail_rows and log and log[-1].checkpoint is None:
            lost += max(1, len(log.pop().rows))
        return MemoryLedger(log)

    def _check(self) -> None:
        if self._closed:
            raise CheckpointError("the journal is closed", where="memory")

    def _apply(self, transaction: Transaction) -> None:
        """All of it or nothing."""
        if transaction.update is not None:
            self._commit(transaction.update, transaction.trajectory_ids)
        if transaction.checkpoint is not None:
            self._checkpoints[transaction.checkpoint.checkpoint] = transaction.checkpoint
        self._append(transaction.rows)
        self._log.append(transaction)

    def _append(self, rows: Sequence[LedgerRow]) -> None:
        trajectories: dict[int, TrajectoryRow] = {}
        prompts: dict[int, PromptRow] = {}
        versions: dict[int, VersionRow] = {}
        for row in rows:
            if isinstance(row, TrajectoryRow):
                check_trajectory(trajectories.get(row.id, self._trajectories.get(row.id)), row)
                trajectories[row.id] = row
            elif isinstance(row, PromptRow):
                check_once(prompts.get(row.prompt_id, self._prompts.get(row.prompt_id)), row)
                prompts[row.prompt_id] = row
            else:
                check_once(versions.get(row.version, self._versions.get(row.version)), row)
                versions[row.version] = row
        self._trajectories |= trajectories
        self._prompts |= prompts
        self._versions |= versions

    def _commit(self, update: int, trajectory_ids: tuple[int, ...]) -> None:
        known = {number: self._trajectories[number] for number in trajectory_ids if number in self._trajectories}
        statuses = {number: row.status for number, row in known.items()}
        check_commit(update, trajectory_ids, max(self._updates, default=None), statuses)
        self._updates[update] = trajectory_ids
        for number, row in known.items():
            self._trajectories[number] = replace(row, status="trained", update_no=update)
