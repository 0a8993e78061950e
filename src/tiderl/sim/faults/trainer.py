"""A trainer that fails: wrappers of the Actor and Update ports.

Its rank dies before, in the middle of and after what it does, calls drag, checkpoints are refused or torn. What it did
compute is right. Knows no simulated trainer, only the ports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from tiderl.data.errors import CheckpointError, RankLost
from tiderl.data.records import MicroBatch, UpdateStats, WeightHandle
from tiderl.data.records import Sequence as TrainSequence
from tiderl.runtime.ports import Actor, Update
from tiderl.sim.faults.plan import Dice

T = TypeVar("T")
KEPT_FOR_A_TORN_ONE = 2
"""Checkpoints that the run keeps at least, where one of them may be torn: else nothing could be resumed."""


class TrainingCalls:
    """What may go wrong in any call of the trainer's rank. `crash()` takes it down, `losses()` counts how often."""

    def __init__(self, dice: Dice, crash: Callable[[], None], losses: Callable[[], int]) -> None:
        self.dice, self.crash, self.losses = dice, crash, losses

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        dice, loop = self.dice, asyncio.get_running_loop()
        if dice.strikes("trainer_crash"):
            loop.call_later(dice.delay_s("trainer_crash"), self.crash)
        started_s, losses = loop.time(), self.losses()
        result = await work()
        if dice.strikes("straggler"):
            await asyncio.sleep(dice.slowed_s(loop.time() - started_s, dice.factor("straggler")))
        if self.losses() != losses:
            raise RankLost("the rank's process died before it answered")
        return result


@dataclass
class Damage:
    """What faults leave behind that outlives a driver."""

    torn: set[str] = field(default_factory=set)
    """Checkpoints that cannot be read."""
    last_saved: str = ""


class FaultyActor:
    """One rank's actor."""

    def __init__(self, inner: Actor, calls: TrainingCalls) -> None:
        self._inner, self._calls = inner, calls
        self.rank = inner.rank

    async def forward(self, mb: MicroBatch, *, proximal: bool = False) -> None:
        await self._calls.call(lambda: self._inner.forward(mb, proximal=proximal))

    async def backward(self, mb: MicroBatch, ref_logprobs: np.ndarray | None) -> None:
        await self._calls.call(lambda: self._inner.backward(mb, ref_logprobs))


class FaultyUpdate:
    """The update of one actor rank."""

    def __init__(self, inner: Update, calls: TrainingCalls, damage: Damage, *, checkpoints_kept: int) -> None:
        self._inner, self._calls, self._damage = inner, calls, damage
        self._may_tear = checkpoints_kept >= KEPT_FOR_A_TORN_ONE

    async def warm_up(self, demos: Sequence[TrainSequence], updates: int, lr: float) -> dict[str, float]:
        return await self._inner.warm_up(demos, updates, lr)

    async def begin(self, update: int, members: Sequence[int]) -> None:
        await self._inner.begin(update, members)

    async def finish(self) -> UpdateStats:
        return await self._calls.call(self._inner.finish)

    async def export(self, version: int) -> WeightHandle:
        if self._calls.dice.strikes("crash_before_publish"):
            self._calls.crash()
        handle = await self._inner.export(version)
        if self._calls.dice.strikes("crash_after_publish"):
            self._calls.crash()
            raise RankLost("the rank's process died")
        return handle

    async def discard(self, handle: WeightHandle) -> None:
        await self._inner.discard(handle)

    async def save(self, directory: str) -> None:
        dice = self._calls.dice
        first = not self._may_tear or directory.endswith("u000000")
        if not first and dice.strikes("checkpoint_fails"):
            raise CheckpointError("no space left on device", where=directory)
        await self._calls.call(lambda: self._inner.save(directory))
        # Never two in a row: the one before stays the newest that can be read until the next is written.
        may_tear = not first and self._damage.last_saved not in self._damage.torn
        self._damage.torn.discard(directory)
        self._damage.last_saved = directory
        if may_tear and dice.strikes("checkpoint_torn"):
            self._damage.torn.add(directory)

    async def restore(self, directory: str) -> None:
        if directory in self._damage.torn:
            raise CheckpointError("the checkpoint's files are torn", where=directory)
        await self._calls.call(lambda: self._inner.restore(directory))

    async def save_model(self, directory: str) -> None:
        await self._inner.save_model(directory)
