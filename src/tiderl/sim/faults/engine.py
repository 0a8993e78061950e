"""An engine that fails: a wrapper of one replica's `Engine` port.

It may lose, cut, delay or refuse what is asked of it, never answer with a token that the engine did not sample: nothing
here may break an invariant by itself. Knows no simulated engine, only the port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from tiderl.data.errors import ChannelTimeout, InfrastructureFault, RankLost
from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.turns import EngineStats, PauseMode, Turn, TurnResult
from tiderl.runtime.ports import Engine
from tiderl.sim.faults.plan import Dice

FAILED_LOADS_IN_A_ROW = 3
"""A transfer fails at most so often in a row: weights that never arrive whole are not the replica's fault."""


class FaultyEngine:
    """`crash()` takes the replica's process down, `losses()` counts how often; its return is the cluster's business.
    `places`: where each task's newest turn ran, of all replicas."""

    def __init__(
        self,
        inner: Engine,
        dice: Dice,
        crash: Callable[[], None],
        losses: Callable[[], int],
        places: dict[TaskKey, int],
    ) -> None:
        self._inner, self._dice, self._crash, self._losses = inner, dice, crash, losses
        self._places = places
        self.replica, self.capabilities = inner.replica, inner.capabilities
        self._slow_factor, self._slow_until_s = 1.0, 0.0
        self._deaf_until_s = 0.0
        self._kept: dict[TaskKey, None] = {}
        """Waiting tasks whose KV the engine was asked to keep."""
        self._offloaded: dict[TaskKey, None] = {}
        self._failed_loads = 0
        self._pending: dict[TaskKey, int] = {}
        self._orphans: dict[asyncio.Task[TurnResult], None] = {}

    @property
    def stats(self) -> EngineStats:
        return self._inner.stats

    async def generate(self, turn: Turn) -> TurnResult:
        dice, loop = self._dice, asyncio.get_running_loop()
        if dice.strikes("engine_crash"):
            loop.call_later(dice.delay_s("engine_crash"), self._crash)
        if dice.strikes("slow_replica"):
            self._slow_factor = dice.factor("slow_replica")
            self._slow_until_s = loop.time() + dice.delay_s("slow_replica")
        if dice.strikes("preemption_storm"):
            for task, number in list(self._pending.items()):
                await self._inner.abort(task, number)
        if dice.strikes("kv_dropped"):
            self._drop(self._kept)
        if not self._hears():
            turn = msgspec.structs.replace(turn, retain=False)
        started_s = loop.time()
        self._pending[turn.task] = turn.turn
        self._places[turn.task] = self.replica
        self._kept.pop(turn.task, None)
        self._offloaded.pop(turn.task, None)
        try:
            result = await self._answer(turn)
        finally:
            self._pending.pop(turn.task, None)
        if turn.retain:
            self._kept[turn.task] = None
        if loop.time() < self._slow_until_s:
            await self._delay(dice.slowed_s(loop.time() - started_s, self._slow_factor))
        return result

    async def _delay(self, seconds: float) -> None:
        """The answer is on its way; it is lost with the process."""
        losses = self._losses()
        await asyncio.sleep(seconds)
        if self._losses() != losses:
            raise RankLost("the replica's process died before it answered", where=f"replica {self.replica}")

    async def _answer(self, turn: Turn) -> TurnResult:
        dice = self._dice
        if dice.strikes("out_of_memory"):
            await self._cut(turn, dice.delay_s("out_of_memory"))
            raise InfrastructureFault("out of memory", where=f"replica {self.replica}")
        if dice.strikes("request_timeout"):
            await self._cut(turn, dice.delay_s("request_timeout"))
            raise ChannelTimeout("no answer within the deadline", where=f"replica {self.replica}")
        if dice.strikes("late_completion"):
            return await self._outliving(turn)
        return await self._inner.generate(turn)

    async def _cut(self, turn: Turn, seconds: float) -> None:
        """Lets the turn run this long, or to its end; what it sampled is lost."""
        try:
            async with asyncio.timeout(seconds):
                await self._inner.generate(turn)
        except TimeoutError:
            pass

    async def _outliving(self, turn: Turn) -> TurnResult:
        """Where its consumer is cancelled, the engine does not hear of it."""
        running = asyncio.get_running_loop().create_task(self._inner.generate(turn), name=f"orphan {turn.task}")
        self._orphans[running] = None
        running.add_done_callback(self._forget)
        return await asyncio.shield(running)

    def _forget(self, orphan: asyncio.Task[TurnResult]) -> None:
        del self._orphans[orphan]
        if not orphan.cancelled():
            orphan.exception()  # nobody else may ask for it

    def close(self) -> None:
        """The driver is gone: nobody waits any more."""
        for orphan in list(self._orphans):
            orphan.cancel()

    async def abort(self, task: TaskKey, turn: int) -> None:
        await self._inner.abort(task, turn)

    def retain(self, task: TaskKey) -> None:
        if self._takes_hint():
            self._inner.retain(task)

    def release(self, task: TaskKey) -> None:
        self._kept.pop(task, None)
        self._offloaded.pop(task, None)
        if self._takes_hint():
            self._inner.release(task)

    def offload(self, task: TaskKey) -> None:
        if self._takes_hint():
            self._inner.offload(task)
            if task in self._kept:
                del self._kept[task]
                self._offloaded[task] = None
        if self._dice.strikes("offload_lost"):
            self._drop(self._offloaded)

    def _hears(self) -> bool:
        return asyncio.get_running_loop().time() >= self._deaf_until_s

    def _takes_hint(self) -> bool:
        """Whether a hint gets through."""
        if self._dice.strikes("kv_hints_unheard"):
            self._deaf_until_s = asyncio.get_running_loop().time() + self._dice.delay_s("kv_hints_unheard")
        return self._hears() and not self._dice.strikes("kv_hint_ignored")

    def _drop(self, tasks: dict[TaskKey, None]) -> None:
        """Their KV is gone, wherever it was: none of them runs now."""
        for task in tasks:
            self._inner.release(task)
        tasks.clear()

    async def pause(self, mode: PauseMode) -> None:
        await self._inner.pause(mode)

    async def resume(self) -> None:
        await self._inner.resume()

    async def load_weights(self, handle: WeightHandle) -> None:
        dice = self._dice
        if self._failed_loads < FAILED_LOADS_IN_A_ROW and dice.strikes("load_fails"):
            self._failed_loads += 1
            await self._delay(dice.delay_s("load_fails"))
            raise InfrastructureFault("the weights do not match their checksum", where=f"replica {self.replica}")
        self._failed_loads = 0
        await self._inner.load_weights(handle)
        if dice.strikes("load_repeated"):
            self._failed_loads = 0
        await self._inner.load_weights(handle)
        if dice.strikes("load_late"):
            await self._delay(dice.delay_s("load_late"))
