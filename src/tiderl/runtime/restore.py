"""The trainer's state after a loss: restore the newest checkpoint that can be read, redo what was committed since.

Keeps I2: an update that is committed is made again from its recorded trajectories and never committed again; one that
was
being made when the rank died is simply made from the start. Serves a resumed driver and a lost trainer rank alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from tiderl.data.errors import CheckpointError, RankLost
from tiderl.data.events import Event, Fault
from tiderl.runtime.buffer import Group
from tiderl.runtime.ports import Ports
from tiderl.runtime.recovery import Recovered, load_consumed, recover
from tiderl.runtime.wakeup import Wakeup

T = TypeVar("T")

MAX_LOSSES_IN_ONE_STEP = 3
"""A step that loses its rank this often in a row is at fault itself; the run fails instead of trying for ever."""


class TrainerRestorer:
    """Runs work on the trainer's rank so that a lost rank costs time, never an update."""

    def __init__(
        self,
        ports: Ports,
        redo: Callable[[int, Sequence[Group]], Awaitable[None]],
        wakeup: Wakeup,
        emit: Callable[[Event], None],
        doing: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.ports, self.redo, self.wakeup, self.emit, self.doing = ports, redo, wakeup, emit, doing
        self.times_lost = self.times_back = 0
        self.life = 0
        """Which life of the rank, counted by its losses, holds the trainer's state. A new one begins empty."""

    def lost(self) -> None:
        """The trainer's rank is down. Its state is gone, also when nothing was running on it."""
        self.times_lost += 1

    def back(self) -> None:
        """The trainer's rank is up again, empty."""
        self.times_back += 1
        self.wakeup.notify()

    async def guarded(self, work: Callable[[], Awaitable[T]], *, starts_from_nothing: bool = False) -> T:
        """`work()` on the trainer's state; when the rank is lost before or meanwhile, waits for its return, restores,
        and does it (again). `starts_from_nothing`: the work makes the very first state, there is none to restore."""
        failures = 0
        while True:
            if self.times_back < self.times_lost:
                with self.doing("restoring"):
                    while self.times_back < self.times_lost:
                        await self.wakeup.wait()
            life, back = self.times_lost, self.times_back
            try:
                if life != self.life:
                    if not starts_from_nothing:
                        await self._restore_from_journal()
                    self.life = life
                return await work()
            except RankLost:
                failures += 1
                if failures >= MAX_LOSSES_IN_ONE_STEP:
                    raise
                with self.doing("restoring"):
                    while self.times_back == back:  # the loss may not have been reported yet
                        await self.wakeup.wait()

    async def _restore_from_journal(self) -> None:
        recovered = recover(await self.ports.ledger.replay(), self.ports.checkpoints.whole)
        if recovered is None:
            raise RankLost("the rank that trains was lost, and no checkpoint could be written before")
        await self.restore(recovered)

    async def restore(self, recovered: Recovered) -> None:
        """Afterwards the trainer is as after the last committed update. Raises `CheckpointError` when nothing can be
        read."""
        with self.doing("restoring"):
            await self.ports.checkpoints.keep_only([name for _, name in recovered.checkpoints])
            for name in recovered.torn:
                self._say_unusable(name)
            restored = await self._restore_newest(recovered)
            for number, rows in recovered.updates:
                if number > restored:
                    await self.redo(number, await load_consumed(number, rows, self.ports.blobs))

    async def _restore_newest(self, recovered: Recovered) -> int:
        checkpoints = self.ports.checkpoints
        for update, name in reversed(recovered.checkpoints):
            try:
                await self.ports.cluster.update.restore(checkpoints.path(name))
            except CheckpointError:
                self._say_unusable(name)
            else:
                return update
        raise CheckpointError(
            "no checkpoint of this run can be read",
            where=", ".join(name for _, name in recovered.checkpoints),
            hint="start it again under another name, or with --overwrite",
        )

    def _say_unusable(self, name: str) -> None:
        now = asyncio.get_running_loop().time()
        self.emit(Fault(t_s=now, where=f"restore {name}", what=CheckpointError.__name__))
