"""Simulated environments: the Environments port over a workload, every wait a sleep of the virtual clock.

Observations are lengths. Slots, deadlines and their faults are as live: a step longer than the deadline is a time-out
after exactly the deadline. What a workload says a worker must serve is served one call at a time on each. Knows no
engine; prompts are numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tiderl.data.errors import ConfigurationError, EnvironmentRaised, EnvironmentTimeout, InvariantViolation
from tiderl.data.records import Action, Observation, Prompt, Split, Step, TaskKey, TokenCount, Trajectory
from tiderl.sim.behaviour import Behaviour

# A task set larger than any pass that matters: the draws depend on the running number of issue, not on the prompt.
TRAIN_PROMPTS = 1_000


class SimEnvironments:
    """Environments of one profile. `eval_prompts` is the size of the held-out set."""

    has_expert = False

    def __init__(
        self,
        workload: Behaviour,
        *,
        slots: int,
        deadline_s: float,
        eval_prompts: int,
        train_prompts: int = TRAIN_PROMPTS,
        workers: int = 1,
    ) -> None:
        self.workload, self.slots, self.deadline_s = workload, slots, deadline_s
        self._sizes: dict[Split, int] = {"train": train_prompts, "eval": eval_prompts}
        self._free = asyncio.Semaphore(slots)
        self._workers = asyncio.Semaphore(workers)

    async def start(self) -> None:
        """Nothing has to be started."""

    async def prompts(self, split: Split) -> Sequence[Prompt]:
        return tuple(Prompt(f"{split}-{number}", seed=number) for number in range(self._sizes[split]))

    async def vocabulary(self) -> tuple[str, ...]:
        """Empty: simulated environments say nothing but lengths."""
        return ()

    async def expert(self, prompt: Prompt) -> Sequence[str]:
        raise ConfigurationError("simulated environments have no expert", where="warmup.demos")

    async def open(self, key: TaskKey, prompt: Prompt) -> SimEnvironmentHandle:
        await self._free.acquire()
        return SimEnvironmentHandle(self, key)

    async def close(self) -> None:
        """Nothing has to be closed."""

    async def serve(self, seconds: float) -> None:
        """Have a worker for so long, after all that came before."""
        if seconds:
            async with self._workers:
                await asyncio.sleep(seconds)

    def give_back(self) -> None:
        """A handle's slot is free again."""
        self._free.release()


class SimEnvironmentHandle:
    """One task's environment; holds its slot until closed."""

    def __init__(self, owner: SimEnvironments, key: TaskKey) -> None:
        self._owner, self._workload, self._key = owner, owner.workload, key
        self._turn = -1  # before reset
        self._open = True

    async def reset(self) -> Observation:
        if self._turn >= 0:
            raise InvariantViolation("an environment is reset once", where=str(self._key))
        await self._wait(self._workload.reset_s(self._key), -1, "reset")
        self._turn = 0
        return Observation((TokenCount(self._workload.first_tokens(self._key)),))

    async def step(self, action: Action) -> Step:
        """The action's content does not matter: its length was drawn with the turn."""
        if self._turn < 0:
            raise InvariantViolation("step before reset", where=str(self._key))
        workload, key, turn = self._workload, self._key, self._turn
        await self._wait(workload.step_s(key, turn), turn, "step")
        self._turn += 1
        shown = TokenCount(workload.observation_tokens(key, turn), workload.profile.observation_images)
        observation = Observation((shown,))
        if self._turn < workload.turns(key):
            return Step(observation)
        success = workload.succeeds(key)
        return Step(observation, reward=float(success), terminated=True, info={"success": success})

    async def score(self, trajectory: Trajectory) -> float | None:
        """The verifier's seconds pass; its answer is the sum of the steps' rewards."""
        if self._workload.profile.score_s:
            await asyncio.sleep(self._workload.profile.score_s)
        return None

    async def pause(self) -> None:
        """Its world stands still by itself: nothing runs between two steps."""

    async def resume(self) -> None:
        """As `pause`."""

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._owner.give_back()

    async def _wait(self, seconds: float, turn: int, what: str) -> None:
        deadline_s = self._owner.deadline_s
        fault = self._workload.fault(self._key, turn)
        if fault == "timeout":
            seconds = deadline_s
        await asyncio.sleep(min(seconds, deadline_s))
        await self._owner.serve(self._workload.served_s(self._key, turn))
        if seconds >= deadline_s:
            raise EnvironmentTimeout(f"{what} took longer than env.deadline_s = {deadline_s:g}", where=str(self._key))
        if fault == "failure":
            raise EnvironmentRaised(f"{what} failed, as drawn", where=str(self._key))
