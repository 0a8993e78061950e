"""One run: takes built ports and frozen settings, runs to its end, in real or in virtual time.

Puts the loops together: rollout, training, one pull loop per replica, the watch over ranks. Nothing here knows which
clock, engine or machine it runs on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiderl.data.errors import DeadlockError, InfrastructureFault
from tiderl.data.events import Event, RankBack, RankLostEvent, RunEnded, RunStarted
from tiderl.data.records import Prompt
from tiderl.data.rng import stream
from tiderl.data.settings import RunSettings
from tiderl.runtime.buffer import Buffer
from tiderl.runtime.evaluation import Evaluator
from tiderl.runtime.ports import Ports
from tiderl.runtime.recovery import Journal
from tiderl.runtime.rollout import Rollout
from tiderl.runtime.sync import Publisher
from tiderl.runtime.task import TaskLimits
from tiderl.runtime.training import Training
from tiderl.runtime.wakeup import Wakeup
from tiderl.runtime.warmup import warm_start
from tiderl.schedule.signals import ReadinessSignals
from tiderl.schedule.strategy import Strategy


@dataclass(frozen=True)
class Outcome:
    """How the run ended: `done`, or `stopped` on request after `updates` updates."""

    outcome: str
    updates: int


def prompt_stream(prompts: Sequence[Prompt], seed: int) -> Iterator[Prompt]:
    """The task set without end: every pass in a new order drawn by the run's seed."""
    number = 0
    while True:
        for index in stream(seed, "prompts", number).permutation(len(prompts)):
            yield prompts[index]
        number += 1


class Run:
    """Built once, run once. `request_stop` may be called at any moment from the loop's thread."""

    def __init__(self, ports: Ports, settings: RunSettings, strategy: Strategy) -> None:
        self.ports, self.settings, self.strategy = ports, settings, strategy
        self.wakeup = Wakeup()
        self.stop_requested = False
        self._training: Training | None = None
        self._main: asyncio.Task[None] | None = None

    def request_stop(self) -> None:
        """Finish the update that is being made, then end. Before the first update: end at once."""
        self.stop_requested = True
        if self._training is not None:
            self._training.stop()
        elif self._main is not None:
            self._main.cancel()

    async def run(self) -> Outcome:
        """Raises what ended the run early: a `TideError` of the port that failed, `DeadlockError`, `InvariantViolation`."""
        settings, cluster = self.settings, self.ports.cluster
        self._emit(
            RunStarted(
                t_s=_now(),
                strategy=self.strategy.name,
                seed=settings.seed,
                ranks=cluster.ranks,
                replicas=len(cluster.engines),
                updates=settings.updates,
                global_batch_groups=settings.global_batch_groups,
                group_size=settings.group_size,
                max_staleness=settings.max_staleness,
                staleness_counts=settings.staleness_counts,
            )
        )
        outcome = "failed"
        updates = 0
        self._main = asyncio.current_task()  # type: ignore[assignment]
        try:
            updates = await self._phases()
            outcome = "done" if updates == settings.updates else "stopped"
        except asyncio.CancelledError:
            if not self.stop_requested:
                raise
            outcome = "stopped"
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            self._emit(RunEnded(t_s=_now(), outcome=outcome, updates=updates))
        return Outcome(outcome, updates)

    async def _phases(self) -> int:
        train_prompts = await self.ports.environments.prompts("train")
        eval_prompts = (await self.ports.environments.prompts("eval"))[: self.settings.evaluation.prompts]
        await warm_start(self.ports, train_prompts, self.settings.warmup, self._limits())
        loops = self._build(train_prompts, eval_prompts)
        self._training = loops.training
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._watch(loops), name="watch"),
                tasks.create_task(loops.rollout.run(loops.check_progress), name="rollout"),
                *(
                    tasks.create_task(loops.publisher.pull(replica), name=f"pull {replica}")
                    for replica in self.ports.cluster.engines
                ),
            ]
            await loops.committed(0)
            await loops.training.run(loops.committed)
            while loops.evaluator.jobs and not self.stop_requested:
                await self.wakeup.wait()
            for task in background:
                task.cancel()
        return loops.buffer.updates_done

    def _limits(self, temperature: float | None = None) -> TaskLimits:
        s = self.settings
        return TaskLimits(
            seed=s.seed,
            max_turns=s.max_turns,
            max_context_tokens=s.max_context_tokens,
            max_new_tokens_per_turn=s.max_new_tokens_per_turn,
            temperature=s.temperature if temperature is None else temperature,
        )

    def _build(self, train_prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> Loops:
        settings, ports = self.settings, self.ports
        buffer = Buffer(
            batch_groups=settings.global_batch_groups,
            max_staleness=settings.max_staleness,
            consumption=self.strategy.consumption,
            signals=ReadinessSignals(settings.micro_batch_tokens),
        )
        journal = Journal(ports.ledger, ports.blobs)
        evaluator = Evaluator(eval_prompts, self.wakeup, self._emit)
        publisher = Publisher(
            ports.cluster,
            self.wakeup,
            self._emit,
            at_new_version=self.strategy.at_new_version,
            held=evaluator.held,
            busy=lambda replica: rollout.busy(replica),
            pinned=evaluator.pinned,
        )
        rollout = Rollout(
            ports,
            buffer,
            journal,
            publisher,
            evaluator,
            self.wakeup,
            prompt_stream(train_prompts, settings.seed),
            self._emit,
            limits=self._limits(),
            eval_limits=self._limits(settings.evaluation.temperature),
            group_size=settings.group_size,
            slots=settings.slots,
            total_groups=settings.updates * settings.global_batch_groups,
        )
        training = Training(ports.cluster, buffer, journal, self.wakeup, self._emit, settings)
        return Loops(settings, buffer, journal, evaluator, publisher, rollout, training)

    async def _watch(self, loops: Loops) -> None:
        """Notices ranks that are lost and come back."""
        while True:
            change = await self.ports.cluster.next_change()
            replicas = [r for r, ranks in self.ports.cluster.engine_ranks.items() if change.rank in ranks]
            if not change.lost:
                self._emit(RankBack(t_s=_now(), rank=change.rank))
                for replica in replicas:
                    loops.publisher.back(replica)
                continue
            tasks = sum(loops.rollout.training_tasks[r] + loops.rollout.eval_tasks[r] for r in replicas)
            self._emit(RankLostEvent(t_s=_now(), rank=change.rank, reason=change.reason, tasks=tasks))
            for replica in replicas:
                loops.publisher.lost(replica)
            if change.rank == loops.training.rank:
                raise InfrastructureFault("the rank that trains was lost", where=f"rank {change.rank}")

    def _emit(self, event: Event) -> None:
        self.ports.recorder.emit(event)


@dataclass
class Loops:
    """The parts of a run in progress, and the two questions that need them all."""

    settings: RunSettings
    buffer: Buffer
    journal: Journal
    evaluator: Evaluator
    publisher: Publisher
    rollout: Rollout
    training: Training

    async def committed(self, update: int) -> None:
        """Publishes the version after this update if it is due, and asks for its evaluation."""
        settings = self.settings
        last = update == settings.updates
        if update % settings.publish_every_updates and not last:
            return
        every = settings.evaluation.every_updates
        due = update == 0 or last or (every > 0 and update // every > self.publisher.newest // every)
        if due:
            self.evaluator.begin(update)
        self.journal.published(update)
        await self.publisher.publish(update)

    def check_progress(self) -> None:
        """Raises `DeadlockError` when no task is in flight, none can start, no load can start and no batch can be made."""
        if self.rollout.in_flight or not self.training.waiting or self.training.stopping:
            return
        if self.publisher.may_progress() or not all(self.publisher.up.values()) or self.buffer.choose():
            return
        groups = self.buffer.groups.values()
        waiting = [f"prompt {g.prompt_id} (due by update {g.deadline + 1})" for g in groups if not g.ready]
        raise DeadlockError(
            f"the trainer waits for update {self.buffer.updates_done + 1} with {len(self.buffer.ready_groups)} ready groups "
            f"of {self.buffer.batch_groups}; rollout is blocked by {self.rollout.blocked}; versions loaded: "
            f"{dict(self.publisher.loaded)}; groups not ready: {', '.join(waiting[:8]) or 'none'}"
        )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show of a group of simultaneous ones: the first, unpacked."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _now() -> float:
    return asyncio.get_running_loop().time()
