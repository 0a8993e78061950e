"""Isolation `async`: environments on the driver's own event loop. No threads, no processes, deterministic.

Plain methods are called directly, so one that blocks blocks the run and no deadline can stop it; `async def`
methods overlap and keep `env.deadline_s`. A class that may hang or crash belongs in `pool` or `process`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiderl.data.errors import (
    EnvironmentFault,
    EnvironmentTimeout,
    InvariantViolation,
    TideError,
    VerifierFault,
)
from tiderl.data.records import Action, Observation, Prompt, Split, Step, TaskKey, Trajectory
from tiderl.data.settings import WaitProfile
from tiderl.data.spans import span
from tiderl.envs.answers import (
    TASK_SET_ERRORS,
    as_observation,
    as_prompts,
    as_reward,
    as_step,
    as_words,
    raised,
)
from tiderl.envs.base import Description, check_methods, check_options, describe
from tiderl.envs.output import ROUTED_PRINTS, LastLines, printed_by
from tiderl.envs.registry import load
from tiderl.envs.slots import Slot, Slots
from tiderl.envs.waits import wait


class AsyncEnvironments:
    """The Environments port in this process. Tasks, waits and slots are as in the pool."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        slots: int,
        deadline_s: float,
        wait: WaitProfile | None = None,
        seed: int = 0,
        log_dir: str | None = None,
    ) -> None:
        self.name, self.options = name, dict(options)
        self.slots, self.deadline_s = slots, deadline_s
        self.wait_profile, self.seed = wait, seed
        self.description = Description(name, (), ())
        self.has_expert = False  # known after `start`
        self._slots = Slots(slots)
        self._class: Any = None

    async def start(self) -> None:
        """Import the class. Raises `ConfigurationError` when there is none."""
        if self._class is None:
            ROUTED_PRINTS.acquire(forward=False)
            try:
                with printed_by(LastLines()):
                    found = load(self.name)
                check_options(found, self.options)
                check_methods(found, self.options)
            except TideError:
                ROUTED_PRINTS.release()
                raise
            self._class = found
            self.description = describe(found)
            self.has_expert = self.description.has_expert

    async def prompts(self, split: Split) -> Sequence[Prompt]:
        where = f"{self.name} prompts"
        answer = await self.call(lambda: self._class.prompts(split, **self.options), where, known=TASK_SET_ERRORS)
        return as_prompts(answer, where)

    async def vocabulary(self) -> tuple[str, ...]:
        """Empty where the environment declares none."""
        if not self.description.has_vocabulary:
            return ()
        where = f"{self.name} vocabulary"
        answer = await self.call(lambda: self._class.vocabulary(**self.options), where, known=TASK_SET_ERRORS)
        return tuple(as_words(answer, where))

    async def expert(self, prompt: Prompt) -> Sequence[str]:
        where = f"{self.name} expert {prompt.id}"
        environment = await self.call(self.make, where, known=TASK_SET_ERRORS)
        try:
            answer = await self.call(lambda: environment.expert(prompt), where, known=TASK_SET_ERRORS)
            return as_words(answer, where)
        finally:
            await self.call(lambda: close(environment), where)

    async def open(self, key: TaskKey, prompt: Prompt) -> AsyncHandle:
        return AsyncHandle(self, await self._slots.take(), key, prompt)

    async def close(self) -> None:
        if self._class is not None:
            self._class = None
            ROUTED_PRINTS.release()

    def pids(self) -> list[int]:
        """This process."""
        return [os.getpid()]

    def make(self) -> Any:
        """A new object of the environment's class."""
        return self._class(**self.options)

    async def call(
        self,
        code: Callable[[], Any],
        where: str,
        lines: LastLines | None = None,
        deadline_s: float | None = None,
        known: tuple[type[TideError], ...] = (EnvironmentFault,),
    ) -> Any:
        """Run the user's code and await what it gives to await; whatever it raises becomes a typed fault."""
        seconds = self.deadline_s if deadline_s is None else deadline_s
        lines = LastLines() if lines is None else lines
        deadline = asyncio.timeout(seconds)
        try:
            with printed_by(lines):
                async with deadline:
                    with span("environment"):
                        answer = code()
                    return await answer if inspect.isawaitable(answer) else answer
        except (Exception, SystemExit) as error:
            if deadline.expired():
                text = f"no answer within env.deadline_s = {self.deadline_s:g}"
                raise EnvironmentTimeout(text, where=where) from error
            raise raised(error, where, lines.lines(), known=known) from error


class AsyncHandle:
    """One task's environment object on the event loop."""

    def __init__(self, owner: AsyncEnvironments, slot: Slot, key: TaskKey, prompt: Prompt) -> None:
        self._owner, self._slot, self._key, self._prompt = owner, slot, key, prompt
        self._where = f"{owner.name} {key}"
        self._printed = LastLines()
        self._environment: Any = None
        self._turn = 0

    async def reset(self) -> Observation:
        if self._environment is not None:
            raise InvariantViolation("an environment is reset once", where=self._where)
        where = f"{self._where} reset"
        self._environment = await self._owner.call(self._owner.make, where, self._printed)
        answer = await self._owner.call(lambda: self._environment.reset(self._prompt), where, self._printed)
        return as_observation(answer, where)

    async def step(self, action: Action) -> Step:
        if self._environment is None:
            raise InvariantViolation("step before reset", where=self._where)
        where = f"{self._where} step"
        owner, turn = self._owner, self._turn
        self._turn += 1
        left_s = await wait(owner.wait_profile, owner.seed, self._key, turn, owner.deadline_s)
        answer = await owner.call(lambda: self._environment.step(action), where, self._printed, left_s)
        return as_step(answer, where)

    async def pause(self) -> None:
        if self._owner.description.has_pause:
            await self._tell("pause", lambda: self._environment.pause())

    async def resume(self) -> None:
        if self._owner.description.has_resume:
            await self._tell("resume", lambda: self._environment.resume())

    async def score(self, trajectory: Trajectory) -> float | None:
        if not self._owner.description.has_score:
            return None
        where = f"{self._where} score"
        try:
            answer = await self._owner.call(lambda: self._environment.score(trajectory), where, self._printed)
        except TideError as error:
            raise VerifierFault(error.what, where=where, hint=error.hint) from error
        return as_reward(answer, where, VerifierFault)

    async def close(self) -> None:
        environment, self._environment = self._environment, None
        try:
            if environment is not None:
                await self._owner.call(lambda: close(environment), f"{self._where} close", self._printed)
        except TideError:
            pass  # the task is over: what its object says while it goes changes nothing
        finally:
            self._slot.give_back()

    async def _tell(self, method: str, code: Callable[[], Any]) -> None:
        """A call whose answer says nothing."""
        if self._environment is None:
            raise InvariantViolation(f"{method} before reset", where=self._where)
        await self._owner.call(code, f"{self._where} {method}", self._printed)


def close(environment: Any) -> Any:
    """Call the object's `close`, where it has one."""
    method = getattr(environment, "close", None)
    return method() if callable(method) else None
