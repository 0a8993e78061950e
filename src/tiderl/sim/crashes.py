"""A driver that dies at a chosen journal point: a wrapper of any Ledger.

What a crash leaves of the journal itself, a lost tail or a torn write, is the journal's to say (`store/memory.py`).
Knows nothing of what the rows mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiderl.runtime.ports import CheckpointRow, Ledger, LedgerRow, Replay


class DriverKilled(BaseException):
    """The driver's process is gone at this moment: nothing may catch it but who stands for the machine."""


class CrashingLedger:
    """`inner` until `writes` of its writes are done; the next one kills the driver before anything is written."""

    def __init__(self, inner: Ledger, writes: int) -> None:
        self._inner, self._left = inner, writes

    def append(self, rows: Sequence[LedgerRow]) -> None:
        self._count()
        self._inner.append(rows)

    async def commit(self, update: int, trajectory_ids: Sequence[int]) -> None:
        self._count()
        await self._inner.commit(update, trajectory_ids)

    async def durable(self, checkpoint: CheckpointRow) -> None:
        self._count()
        await self._inner.durable(checkpoint)

    async def replay(self) -> Replay:
        return await self._inner.replay()

    async def close(self) -> None:
        await self._inner.close()

    def _count(self) -> None:
        if self._left == 0:
            raise DriverKilled
        self._left -= 1
