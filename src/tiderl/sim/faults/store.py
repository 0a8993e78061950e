"""A driver that dies at a write, and a disk that refuses one: wrappers of the Ledger and Blobs ports.

A crash comes before or after the write, which is then there or not, whole: what is lost or torn of the journal's tail
is decided when it is opened again. Knows nothing of what the rows mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tiderl.data.errors import CheckpointError
from tiderl.data.events import Event
from tiderl.data.records import Trajectory
from tiderl.runtime.ports import Blobs, CheckpointRow, Ledger, LedgerRow, Recorder, Replay
from tiderl.sim.crashes import DriverKilled
from tiderl.sim.faults.plan import Dice


class DriverLife:
    """One driver. `stop` and `cancel` are what Ctrl-C does, once and twice."""

    def __init__(self, dice: Dice | None) -> None:
        self.dice = dice
        self.alive = True
        self.cancelled = False
        self.stop: Callable[[], None] = lambda: None
        self.cancel: Callable[[], object] = lambda: None

    def die(self) -> None:
        """Raises `DriverKilled` if the driver dies here, or is dead already: nothing of it acts any more."""
        if self.alive and self.dice is not None and self.dice.strikes("driver_crash"):
            self.alive = False
        if not self.alive:
            raise DriverKilled

    def interrupt(self) -> None:
        if self.dice is not None and self.dice.strikes("driver_stopped"):
            self.stop()
        if not self.cancelled and self.dice is not None and self.dice.strikes("consumer_cancelled"):
            self.cancelled = True
            self.cancel()

    def refuse(self, what: str) -> None:
        if self.dice is not None and self.dice.strikes("write_fails"):
            raise CheckpointError("no space left on device", where=what)


class MortalRecorder:
    """`inner`, as long as its driver lives."""

    def __init__(self, inner: Recorder, life: DriverLife) -> None:
        self._inner, self._life = inner, life

    def emit(self, event: Event) -> None:
        if self._life.alive:
            self._inner.emit(event)


class FaultyLedger:
    """`inner`, as long as its driver lives."""

    def __init__(self, inner: Ledger, life: DriverLife) -> None:
        self._inner, self._life = inner, life

    def append(self, rows: Sequence[LedgerRow]) -> None:
        self._life.die()
        self._life.interrupt()
        self._inner.append(rows)
        self._life.die()

    async def commit(self, update: int, trajectory_ids: Sequence[int]) -> None:
        self._life.die()
        self._life.refuse("journal")
        await self._inner.commit(update, trajectory_ids)
        self._life.die()

    async def durable(self, checkpoint: CheckpointRow) -> None:
        self._life.die()
        await self._inner.durable(checkpoint)
        self._life.die()

    async def replay(self) -> Replay:
        return await self._inner.replay()

    async def close(self) -> None:
        await self._inner.close()


class FaultyBlobs:
    """`inner`, as long as its driver lives."""

    def __init__(self, inner: Blobs, life: DriverLife) -> None:
        self._inner, self._life = inner, life

    async def put(self, trajectory: Trajectory) -> str:
        self._life.refuse("payloads")
        sha256 = await self._inner.put(trajectory)
        self._life.die()
        return sha256

    async def get(self, sha256: str) -> Trajectory:
        return await self._inner.get(sha256)

    async def delete(self, sha256s: Sequence[str]) -> None:
        self._life.die()
        await self._inner.delete(sha256s)

    async def keep_only(self, sha256s: Collection[str]) -> None:
        await self._inner.keep_only(sha256s)
