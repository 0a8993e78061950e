"""Environments that fail: a wrapper of the Environments port and its handles.

What arrives at the port is what the isolation of a live environment makes of a failure: a typed fault, in time. Knows
no simulated environment, only the port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tiderl.data.errors import (
    EnvironmentNonsense,
    EnvironmentRaised,
    EnvironmentTimeout,
    InfrastructureFault,
    VerifierFault,
)
from tiderl.data.records import Action, Observation, Prompt, Split, Step, TaskKey, Trajectory
from tiderl.runtime.ports import EnvironmentHandle, Environments
from tiderl.sim.faults.plan import Dice


class FaultyEnvironments:
    """`inner`, with handles that fail. `pauses(key)` hears of tasks that pause."""

    def __init__(self, inner: Environments, dice: Dice, pauses: Callable[[TaskKey], None] = lambda key: None) -> None:
        self._inner, self.dice, self.pauses = inner, dice, pauses
        self.slots, self.has_expert = inner.slots, inner.has_expert
        self.worker_losses = 0
        self.poisoned: dict[tuple[str, int, int], bool] = {}
        """(Split, prompt, member) that have been opened, and whether they fail until calm."""
        self._thieves: dict[asyncio.Task[None], None] = {}

    async def start(self) -> None:
        await self._inner.start()

    async def prompts(self, split: Split) -> Sequence[Prompt]:
        return await self._inner.prompts(split)

    async def vocabulary(self) -> tuple[str, ...]:
        return await self._inner.vocabulary()

    async def expert(self, prompt: Prompt) -> Sequence[str]:
        return await self._inner.expert(prompt)

    async def open(self, key: TaskKey, prompt: Prompt) -> FaultyHandle:
        if self.slots > 1 and not self._thieves and self.dice.strikes("env_slot_lost"):
            thief = asyncio.get_running_loop().create_task(self._take_slot(prompt), name="lost slot")
            self._thieves[thief] = None
            thief.add_done_callback(self._thieves.pop)
        member = (key.split, key.prompt_id, key.member)
        if member not in self.poisoned:
            self.poisoned[member] = self.dice.strikes("env_poisoned")
        return FaultyHandle(await self._inner.open(key, prompt), self, key)

    async def _take_slot(self, prompt: Prompt) -> None:
        handle = await self._inner.open(TaskKey("warmup", 0, 0), prompt)
        try:
            await asyncio.sleep(self.dice.delay_s("env_slot_lost"))
        finally:
            await handle.close()

    async def close(self) -> None:
        for thief in list(self._thieves):
            thief.cancel()
        await self._inner.close()


class FaultyHandle:
    """One task's environment, on the worker that all open ones share."""

    def __init__(self, inner: EnvironmentHandle, owner: FaultyEnvironments, key: TaskKey) -> None:
        self._inner, self._owner, self._key = inner, owner, key
        self._worker = owner.worker_losses
        self._closing_s = 0.0

    async def reset(self) -> Observation:
        await self._fail()
        return await self._inner.reset()

    async def step(self, action: Action) -> Step:
        await self._fail()
        return await self._inner.step(action)

    async def score(self, trajectory: Trajectory) -> float | None:
        if self._owner.dice.strikes("verifier_fault"):
            raise VerifierFault("the verifier answered nonsense", where=str(self._key))
        return await self._inner.score(trajectory)

    async def pause(self) -> None:
        self._fail_to_pause()
        self._owner.pauses(self._key)
        await self._inner.pause()

    async def resume(self) -> None:
        self._fail_to_pause()
        await self._inner.resume()

    async def close(self) -> None:
        seconds, self._closing_s = self._closing_s, 0.0
        try:
            if seconds:
                await asyncio.sleep(seconds)
        finally:
            await self._inner.close()

    def _fail_to_pause(self) -> None:
        self._need_worker()
        if self._owner.dice.strikes("env_pause_fails"):
            raise EnvironmentRaised("the environment raised where it should pause", where=str(self._key))

    def _need_worker(self) -> None:
        if self._worker != self._owner.worker_losses:
            raise InfrastructureFault("the environment's worker died", where=str(self._key))

    async def _fail(self) -> None:
        dice, owner, where = self._owner.dice, self._owner, str(self._key)
        owner.worker_losses += dice.strikes("env_worker_lost")
        self._need_worker()
        poisoned = owner.poisoned[self._key.split, self._key.prompt_id, self._key.member] and not dice.calm()
        if poisoned or dice.strikes("env_crash"):
            raise EnvironmentRaised("the environment raised", where=where)
        if dice.strikes("env_garbage"):
            raise EnvironmentNonsense("the reward is not finite", where=where)
        if dice.strikes("env_slow"):
            await asyncio.sleep(dice.delay_s("env_slow"))
        if dice.strikes("env_hang"):
            await self._hang()
        if dice.strikes("env_never_returns"):
            self._closing_s = dice.delay_s("env_never_returns")
            await self._hang()

    async def _hang(self) -> None:
        await asyncio.sleep(self._owner.dice.plan.hang_s)
        raise EnvironmentTimeout("the environment hung past its deadline", where=str(self._key))
