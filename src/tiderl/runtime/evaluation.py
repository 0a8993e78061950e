"""Evaluation on held-out prompts, each job pinned to one version and overlapped with training.

While a replica holds a job's tasks, or waits for them, it loads nothing newer. Evaluation trajectories are never in the
journal's tables and never trained (I1).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiderl.data.events import EvalFinished, EvalShare, Event
from tiderl.data.records import Prompt, TaskKey, Trajectory
from tiderl.runtime.wakeup import Wakeup


@dataclass
class EvalJob:
    version: int
    waiting: deque[TaskKey]
    started_s: float
    running: dict[int, int] = field(default_factory=dict)  # replica -> tasks
    finished: list[Trajectory] = field(default_factory=list)
    failures: list[TaskKey] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Episodes that ended in a fault for good."""
        return len(self.failures)

    @property
    def done(self) -> bool:
        return not self.waiting and not any(self.running.values())


class Evaluator:
    """The queue of jobs. Rollout asks for tasks and reports back; publishing asks what is held and pinned."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        wakeup: Wakeup,
        emit: Callable[[Event], None],
        *,
        samples: int = 1,
        judge: Callable[[EvalJob], None] = lambda job: None,
    ) -> None:
        """`samples`: episodes for each prompt. `judge` gets each job when it is done, before its event."""
        self.prompts, self.wakeup, self.emit = prompts, wakeup, emit
        self.samples, self.judge = samples, judge
        self.jobs: list[EvalJob] = []

    def begin(self, version: int) -> None:
        """Asks for an evaluation of this version: every held-out prompt, `samples` times."""
        if not self.prompts:
            return
        keys = deque(
            TaskKey("eval", index, member) for index in range(len(self.prompts)) for member in range(self.samples)
        )
        self.jobs.append(EvalJob(version, keys, asyncio.get_running_loop().time()))
        self.wakeup.notify()

    def pinned(self) -> list[int]:
        return [job.version for job in self.jobs]

    def running_version(self, replica: int) -> int | None:
        """Of the job that has tasks there."""
        return next((job.version for job in self.jobs if job.running.get(replica)), None)

    def held(self, replica: int, version: int) -> bool:
        return any(job.version == version and (job.waiting or job.running.get(replica)) for job in self.jobs)

    def waiting_version(self) -> int | None:
        """The version of the oldest job with tasks that have not started."""
        return next((job.version for job in self.jobs if job.waiting), None)

    def waiting_prompt(self) -> Prompt | None:
        """Of the first task that has not started."""
        key = next((job.waiting[0] for job in self.jobs if job.waiting), None)
        return None if key is None else self.prompts[key.prompt_id]

    def take(self, replica: int) -> tuple[EvalJob, TaskKey]:
        job = next(job for job in self.jobs if job.waiting)
        job.running[replica] = job.running.get(replica, 0) + 1
        return job, job.waiting.popleft()

    def finished(self, job: EvalJob, replica: int, trajectory: Trajectory) -> None:
        job.finished.append(trajectory)
        self._leave(job, replica)

    def failed(self, job: EvalJob, replica: int, key: TaskKey, *, again: bool) -> None:
        """The task failed of a fault; `again`: it goes back to the queue as another attempt."""
        if again:
            job.waiting.append(TaskKey("eval", key.prompt_id, key.member, key.attempt + 1))
        else:
            job.failures.append(key)
        self._leave(job, replica)

    def _leave(self, job: EvalJob, replica: int) -> None:
        job.running[replica] -= 1
        if job.done:
            self.jobs.remove(job)
            self.judge(job)
            now = asyncio.get_running_loop().time()
            count = len(job.finished)
            self.emit(
                EvalFinished(
                    t_s=now,
                    version=job.version,
                    prompts=count,
                    successes=sum(t.success for t in job.finished),
                    failed=job.failed,
                    reward_mean=sum(t.reward for t in job.finished) / count if count else 0.0,
                    turns_mean=sum(len(t.turns) for t in job.finished) / count if count else 0.0,
                    seconds=now - job.started_s,
                    by_environment=self._shares(job),
                )
            )
        self.wakeup.notify()

    def _shares(self, job: EvalJob) -> dict[str, EvalShare]:
        """Of a mixture: each environment's part."""
        done: dict[str, list[Trajectory]] = {}
        for trajectory in job.finished:
            done.setdefault(self.prompts[trajectory.key.prompt_id].environment, []).append(trajectory)
        failed = Counter(self.prompts[key.prompt_id].environment for key in job.failures)
        return {
            name: EvalShare(
                prompts=len(own := done.get(name, [])),
                successes=sum(t.success for t in own),
                failed=failed[name],
                reward_mean=sum(t.reward for t in own) / len(own) if own else 0.0,
            )
            for name in dict.fromkeys(prompt.environment for prompt in self.prompts)
            if name
        }
