"""Isolations `pool` and `process`: environments in worker processes, many each or one each.

The driver imports nothing of the user's. A hung call costs its own task, a dead worker costs the tasks in it,
and both are replaced when the next environment is placed. Must not know the runtime: it implements the
Environments port.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from tiderl.data.errors import (
    ConfigurationError,
    EnvironmentFault,
    EnvironmentMemory,
    EnvironmentRaised,
    EnvironmentTimeout,
    InfrastructureFault,
    InvariantViolation,
    TideError,
    VerifierFault,
)
from tiderl.data.records import Action, Observation, Prompt, Split, Step, TaskKey, Trajectory
from tiderl.data.settings import WaitProfile
from tiderl.data.spans import ProcessSpans
from tiderl.envs import protocol
from tiderl.envs.base import Description
from tiderl.envs.inprocess import AsyncEnvironments
from tiderl.envs.remote import ANSWER_S, WorkerProcess
from tiderl.envs.slots import Slot, Slots
from tiderl.envs.waits import wait

T = TypeVar("T")

CLOSE_S = 2.0
"""How long a task's end waits for its environment's `close`; after that the slot is free and the object
abandoned."""
TASK_SET_DEADLINES = 4
"""`prompts` and `vocabulary` may read files, and run once: they get so many times `deadline_s`."""
HUNG_AFTER_FRACTION = 0.5
"""Of `deadline_s`: a call that nobody waits for any more and that has been running for so long is hung."""
RETIRED_WORKERS_MAX = 2
"""Workers that only wait for their last tasks; with more, one that holds a hung call stays in use."""

Isolation = Literal["async", "pool", "process"]


class PoolEnvironments:
    """The Environments port over worker processes: `workers` of them that hold many environments each, or,
    where `one_each`, up to `slots` that hold one at a time, started when needed, kept for the next, killed
    when a call hangs."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        workers: int,
        slots: int,
        deadline_s: float,
        wait: WaitProfile | None = None,
        seed: int = 0,
        log_dir: str | None = None,
        one_each: bool = False,
        answer_s: float = ANSWER_S,
        profile: bool = False,
    ) -> None:
        self.name, self.options = name, dict(options)
        self.slots, self.deadline_s = slots, deadline_s
        self.wait_profile, self.seed = wait, seed
        self.description = Description(name, (), ())
        self.has_expert = False  # known after `start`
        self.one_each = one_each
        self._worker_count = workers
        self._answer_s = answer_s
        self._profile = profile
        self._slots = Slots(slots)
        self._workers: list[WorkerProcess] = []
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._temporary = None if log_dir else tempfile.mkdtemp(prefix="tiderl-envs-")
        self._log_dir = Path(log_dir or str(self._temporary))
        self._closed = False

    async def start(self) -> None:
        """Start the workers. Raises `ConfigurationError` when the name is no environment, and when the import of it
        dies or never ends."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            first = await self._start_worker()
        except (EnvironmentTimeout, InfrastructureFault) as fault:
            raise ConfigurationError(fault.what, where=fault.where, hint=fault.hint) from fault
        self.description = first.description
        self.has_expert = self.description.has_expert
        if self.description.coroutines:
            await self._end(first, "its methods cannot run here")
            raise ConfigurationError(
                f"{self.description.coroutines[0]} is `async def`",
                where=f"env.name {self.name}",
                hint="set env.isolation: async, or write it as a plain `def`",
            )
        if not self.one_each:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._worker_count - 1):
                        group.create_task(self._start_worker())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from errors

    async def prompts(self, split: Split) -> Sequence[Prompt]:
        def request(lane: int) -> protocol.LaneRequest:
            return protocol.PromptsRequest(lane=lane, where=f"{self.name} prompts", split=split)

        return await self._once(protocol.PROMPTS, request, list[Prompt], TASK_SET_DEADLINES * self.deadline_s)

    async def vocabulary(self) -> tuple[str, ...]:
        """Empty where the environment declares none."""
        if not self.description.has_vocabulary:
            return ()

        def request(lane: int) -> protocol.LaneRequest:
            return protocol.VocabularyRequest(lane=lane, where=f"{self.name} vocabulary")

        return await self._once(protocol.VOCABULARY, request, tuple[str, ...], TASK_SET_DEADLINES * self.deadline_s)

    async def expert(self, prompt: Prompt) -> Sequence[str]:
        def request(lane: int) -> protocol.LaneRequest:
            return protocol.ExpertRequest(lane=lane, where=f"{self.name} expert {prompt.id}", prompt=prompt)

        return await self._once(protocol.EXPERT, request, list[str], self.deadline_s)

    async def open(self, key: TaskKey, prompt: Prompt) -> PoolHandle:
        return PoolHandle(self, await self._slots.take(), key, prompt)

    async def close(self) -> None:
        """End the workers, whatever they do. Idempotent."""
        self._closed = True
        workers, self._workers = self._workers, []
        for worker in workers:
            await worker.kill("the run is over")
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def pids(self) -> list[int]:
        """The process ids of the workers that live."""
        return [worker.pid for worker in self._workers if worker.is_alive]

    async def spans(self) -> list[tuple[str, ProcessSpans]]:
        """See `data.spans.Spanned`: all workers are one host."""
        found = await asyncio.gather(*(worker.spans() for worker in self._workers))
        return [("environment workers", one) for one in found if one is not None]

    async def place(self) -> WorkerProcess:
        """A worker for one more environment, counted in. Dead and retired ones are replaced."""
        if self.one_each:
            worker = next((worker for worker in self._accepting() if worker.environments == 0), None)
            if worker is None:
                worker = await self._replacement()
        else:
            async with self._starting:
                if len(self._accepting()) < self._worker_count:
                    await self._replacement()
                worker = min(self._accepting(), key=lambda worker: worker.environments)
        worker.environments += 1
        return worker

    async def leave(self, worker: WorkerProcess) -> None:
        """One environment less in `worker`."""
        worker.environments -= 1
        if worker.retired and worker.environments == 0:
            await self._end(worker, "a call of its never ended")

    async def call(
        self,
        worker: WorkerProcess,
        method: str,
        request: protocol.LaneRequest,
        result: type[T] | Any,
        deadline_s: float,
    ) -> T:
        """One call. What hangs is abandoned, or killed where it has the worker for itself."""
        try:
            answer: T = await worker.call(method, request, result, deadline_s)
            return answer
        except EnvironmentTimeout:
            if self.one_each:
                await self._end(worker, "a call of its never ended")
            else:
                await self._abandon(worker, request)
            raise
        except TideError as error:
            if not worker.is_alive:
                await self._end(worker, "it is gone")
            elif self.one_each and isinstance(error, EnvironmentMemory):
                await self._end(worker, "it took more memory than it may")
            raise

    async def close_lane(self, worker: WorkerProcess, lane: int, where: str) -> None:
        """End a lane and its environment; give up after `CLOSE_S`."""
        request = protocol.CloseRequest(lane=lane, where=where)
        with contextlib.suppress(TideError):  # the task is over: what its object says while it goes changes nothing
            await self.call(worker, protocol.CLOSE, request, None, min(CLOSE_S, self.deadline_s))

    async def _once(
        self, method: str, request: Callable[[int], protocol.LaneRequest], result: Any, deadline_s: float
    ) -> Any:
        """A call in a lane of its own."""
        worker = await self.place()
        lane = worker.new_lane()
        try:
            return await self.call(worker, method, request(lane), result, deadline_s)
        finally:
            await self.close_lane(worker, lane, f"{self.name} close")
            await self.leave(worker)

    def _accepting(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.is_alive and not worker.retired]

    async def _abandon(self, worker: WorkerProcess, request: protocol.LaneRequest) -> None:
        """A thread cannot be stopped: a worker that holds a hung call waits for its last tasks and ends."""
        hung = await worker.abandon(request.lane, request.where, self.deadline_s * HUNG_AFTER_FRACTION)
        retired = sum(other.is_alive and other.retired for other in self._workers)
        if hung and retired < RETIRED_WORKERS_MAX:
            worker.retired = True

    async def _start_worker(self) -> WorkerProcess:
        log = self._log_dir / f"env-{next(self._numbers)}.log"
        worker = await WorkerProcess.start(
            self.name, self.options, log, self._answer_s, alone=self.one_each, profile=self._profile
        )
        if self._closed:
            await worker.kill("the run is over")
        self._workers.append(worker)
        return worker

    async def _replacement(self) -> WorkerProcess:
        try:
            return await self._start_worker()
        except ConfigurationError as error:  # it could be loaded when the run began
            raise EnvironmentRaised(f"it can no longer be loaded: {error.what}", where=error.where) from error

    async def _end(self, worker: WorkerProcess, reason: str) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
        await worker.kill(reason)


class PoolHandle:
    """One task's environment in a worker."""

    def __init__(self, pool: PoolEnvironments, slot: Slot, key: TaskKey, prompt: Prompt) -> None:
        self._pool, self._slot, self._key, self._prompt = pool, slot, key, prompt
        self._where = f"{pool.name} {key}"
        self._worker: WorkerProcess | None = None
        self._lane = -1
        self._turn = 0

    async def reset(self) -> Observation:
        if self._worker is not None:
            raise InvariantViolation("an environment is reset once", where=self._where)
        self._worker = await self._pool.place()
        self._lane = self._worker.new_lane()
        request = protocol.ResetRequest(lane=self._lane, where=f"{self._where} reset", prompt=self._prompt)
        return await self._call(protocol.RESET, request, Observation, self._pool.deadline_s)

    async def step(self, action: Action) -> Step:
        pool, turn = self._pool, self._turn
        self._turn += 1
        left_s = await wait(pool.wait_profile, pool.seed, self._key, turn, pool.deadline_s)
        request = protocol.StepRequest(lane=self._lane, where=f"{self._where} step", action=action)
        return await self._call(protocol.STEP, request, Step, left_s)

    async def pause(self) -> None:
        if self._pool.description.has_pause:
            request = protocol.PauseRequest(lane=self._lane, where=f"{self._where} pause")
            await self._call(protocol.PAUSE, request, None, self._pool.deadline_s)

    async def resume(self) -> None:
        if self._pool.description.has_resume:
            request = protocol.ResumeRequest(lane=self._lane, where=f"{self._where} resume")
            await self._call(protocol.RESUME, request, None, self._pool.deadline_s)

    async def score(self, trajectory: Trajectory) -> float | None:
        if not self._pool.description.has_score:
            return None
        where = f"{self._where} score"
        request = protocol.ScoreRequest(lane=self._lane, where=where, trajectory=trajectory)
        try:
            return await self._call(protocol.SCORE, request, float, self._pool.deadline_s)
        except EnvironmentFault as error:
            raise VerifierFault(error.what, where=where, hint=error.hint) from error

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        try:
            if worker is not None:
                await self._pool.close_lane(worker, self._lane, f"{self._where} close")
        finally:
            self._slot.give_back()
            if worker is not None:
                await self._pool.leave(worker)

    async def _call(self, method: str, request: protocol.LaneRequest, result: type[T] | Any, deadline_s: float) -> T:
        if self._worker is None:
            raise InvariantViolation(f"{method} before reset", where=self._where)
        answer: T = await self._pool.call(self._worker, method, request, result, deadline_s)
        return answer


def build_environments(
    isolation: Isolation,
    name: str,
    options: Mapping[str, Any],
    *,
    workers: int,
    slots: int,
    deadline_s: float,
    wait: WaitProfile | None = None,
    seed: int = 0,
    log_dir: str | None = None,
    profile: bool = False,
) -> AsyncEnvironments | PoolEnvironments:
    """The Environments port for an isolation; `workers` counts for `pool` only, `profile` where there are processes."""
    if isolation == "async":
        return AsyncEnvironments(
            name, options, slots=slots, deadline_s=deadline_s, wait=wait, seed=seed, log_dir=log_dir
        )
    return PoolEnvironments(
        name,
        options,
        workers=workers,
        slots=slots,
        deadline_s=deadline_s,
        wait=wait,
        seed=seed,
        log_dir=log_dir,
        one_each=isolation == "process",
        profile=profile,
    )
