"""One run: takes built ports and frozen settings, runs to its end, in real or in virtual time.

Puts the loops together: rollout, training, one pull loop per replica, the watch over ranks. Nothing here knows which
clock, engine or machine it runs on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from tiderl.data.errors import CheckpointError, DeadlockError
from tiderl.data.events import Event, Fault, RankBack, RankLostEvent, RunEnded, RunStarted
from tiderl.data.pools import PoolBook
from tiderl.data.records import Prompt
from tiderl.data.settings import RunSettings
from tiderl.runtime.buffer import Buffer, Group
from tiderl.runtime.checkpoints import Checkpointer
from tiderl.runtime.evaluation import EvalJob, Evaluator
from tiderl.runtime.journal import Journal
from tiderl.runtime.kv import KvPolicy
from tiderl.runtime.ports import Ports
from tiderl.runtime.prompts import demonstration_prompts, held_out_prompts, prompt_stream
from tiderl.runtime.recovery import Recovered, load_group, recover
from tiderl.runtime.restore import TrainerRestorer
from tiderl.runtime.rollout import Rollout
from tiderl.runtime.sync import Publisher
from tiderl.runtime.task import TaskLimits
from tiderl.runtime.training import Training
from tiderl.runtime.wakeup import Wakeup
from tiderl.runtime.warmup import warm_start
from tiderl.schedule.priority import Weights
from tiderl.schedule.signals import ReadinessSignals
from tiderl.schedule.staleness import NO_DEADLINE, deadline
from tiderl.schedule.strategy import Strategy
from tiderl.schedule.tasks import KvRules


@dataclass(frozen=True)
class Outcome:
    """How the run ended: `done`, or `stopped` on request after `updates` updates."""

    outcome: str
    updates: int


class Run:
    """Built once, run once. `request_stop` may be called at any moment from the loop's thread."""

    def __init__(
        self,
        ports: Ports,
        settings: RunSettings,
        strategy: Strategy,
        *,
        on_evaluated: Callable[[EvalJob], None] = lambda job: None,
        reported_updates: int | None = None,
    ) -> None:
        """`settings.updates` 0: the start model is evaluated, and that is all. `on_evaluated` gets every evaluation
        with its trajectories. `reported_updates`: the newest update whose commit is among the events of a run that goes
        on; None: all of them are."""
        self.ports, self.settings, self.strategy = ports, settings, strategy
        self.reported_updates = reported_updates
        self.on_evaluated = on_evaluated
        self.wakeup = Wakeup()
        self.stop_requested = False
        self._training: Training | None = None
        self._kv: KvPolicy | None = None
        self._main: asyncio.Task[None] | None = None

    def request_stop(self) -> None:
        """Finish the update that is being made, then end. Before the first update: end at once."""
        self.stop_requested = True
        if self._training is not None:
            self._training.stop()
        elif self._main is not None:
            self._main.cancel()

    def kv_books(self) -> Mapping[int, PoolBook]:
        """What the pool of each replica says of itself; none before tasks can start, and under `lru`."""
        return {} if self._kv is None else self._kv.books()

    async def run(self) -> Outcome:
        """Raises what ended the run early: a `TideError` of the port that failed, `DeadlockError`,
        `InvariantViolation`."""
        settings, cluster, kv = self.settings, self.ports.cluster, self._kv_rules()
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
                engine_ranks=tuple(tuple(cluster.engine_ranks[replica]) for replica in sorted(cluster.engine_ranks)),
                actor_ranks=tuple(actor.rank for actor in cluster.actors),
                kv_policy=settings.kv_policy,
                priority="" if kv is None else kv.priority,
                priority_weights=asdict(kv.weights) if kv is not None and kv.priority == "weighted" else {},
            )
        )
        outcome = "failed"
        updates = 0
        self._main = asyncio.current_task()
        try:
            updates = await self._phases()
            outcome = "done" if updates >= settings.updates else "stopped"
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
        environments = self.ports.environments
        train_prompts = await environments.prompts("train")
        eval_prompts = held_out_prompts(
            await environments.prompts("eval"), self.settings.evaluation.prompts, self.settings.environment_weights
        )
        loops = self._build(train_prompts, eval_prompts if self.settings.evaluation.every_updates else ())
        recovered = recover(await self.ports.ledger.replay(), self.ports.checkpoints.whole)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch(loops), name="watch")
            if recovered is None:
                await loops.restorer.guarded(lambda: self._start(loops, train_prompts), starts_from_nothing=True)
            else:
                reported = recovered.updates_done if self.reported_updates is None else self.reported_updates
                loops.training.reported_updates = reported
                await loops.resume(recovered, train_prompts)
            order = prompt_stream(train_prompts, self.settings.seed, self.settings.environment_weights)
            loops.rollout.prompts = islice(order, loops.buffer.next_prompt_id, None)
            self._training, self._kv = loops.training, loops.rollout.kv
            background = [
                watch,
                tasks.create_task(loops.rollout.run(loops.check_progress), name="rollout"),
                *(
                    tasks.create_task(loops.publisher.pull(replica), name=f"pull {replica}")
                    for replica in self.ports.cluster.engines
                ),
            ]
            await loops.publish(loops.buffer.updates_done)
            await loops.training.run(loops.committed)
            while loops.evaluator.jobs and not self.stop_requested:
                await self.wakeup.wait()
            if loops.checkpointer.last_update < loops.buffer.updates_done:
                await loops.restorer.guarded(lambda: loops.checkpointer.write(loops.buffer.updates_done))
            for task in background:
                task.cancel()
        return loops.buffer.updates_done

    async def _start(self, loops: Loops, train_prompts: Sequence[Prompt]) -> None:
        """A new run: its warm start, and what that made as checkpoint 0."""
        await self.ports.checkpoints.keep_only(())
        settings = self.settings
        demonstrated = demonstration_prompts(
            train_prompts, settings.warmup.demos, settings.seed, settings.environment_weights
        )
        await warm_start(self.ports, demonstrated, settings.warmup, self._limits())
        if self.settings.updates:
            await loops.checkpointer.write(0)

    def _judge(self, job: EvalJob) -> None:
        """An evaluation is done: is its version the best so far?"""
        self.on_evaluated(job)
        if self.ports.models is not None:
            try:
                self.ports.models.judge(job.version, sum(t.success for t in job.finished), len(job.finished))
            except CheckpointError as error:
                self._emit(Fault(t_s=_now(), where="best model", what=type(error).__name__))

    def _limits(self, temperature: float | None = None) -> TaskLimits:
        s = self.settings
        return TaskLimits(
            seed=s.seed,
            max_turns=s.max_turns,
            max_context_tokens=s.max_context_tokens,
            max_new_tokens_per_turn=s.max_new_tokens_per_turn,
            temperature=s.temperature if temperature is None else temperature,
            image_window=s.image_window,
        )

    def _kv_rules(self) -> KvRules | None:
        s = self.settings
        if s.kv_policy != "ctb":
            return None
        return KvRules(
            max_turns=s.max_turns,
            max_context_tokens=s.max_context_tokens,
            group_size=s.group_size,
            unlimited_tokens=s.slots * s.max_context_tokens,
            growth_z=s.growth_z,
            patience_s=s.patience_s,
            priority=s.priority,
            weights=Weights(**s.priority_weights),
        )

    def _build(self, train_prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> Loops:
        settings, ports = self.settings, self.ports
        buffer = Buffer(
            batch_groups=settings.global_batch_groups,
            max_staleness=settings.max_staleness,
            consumption=self.strategy.consumption,
            counts=settings.staleness_counts,
            signals=ReadinessSignals(settings.micro_batch_tokens),
        )
        journal = Journal(ports.ledger, ports.blobs)
        evaluator = Evaluator(
            eval_prompts, self.wakeup, self._emit, samples=settings.evaluation.samples, judge=self._judge
        )
        publisher = Publisher(
            ports.cluster,
            self.wakeup,
            self._emit,
            at_new_version=self.strategy.at_new_version,
            held=evaluator.held,
            busy=lambda replica: rollout.busy(replica),
            pinned=evaluator.pinned,
            evaluates=evaluator.running_version,
        )
        rollout = Rollout(
            ports,
            buffer,
            journal,
            publisher,
            evaluator,
            self.wakeup,
            iter(()),
            self._emit,
            limits=self._limits(),
            eval_limits=self._limits(settings.evaluation.temperature),
            group_size=settings.group_size,
            slots=settings.slots,
            total_groups=settings.updates * settings.global_batch_groups,
            kv=self._kv_rules(),
        )
        training = Training(ports, buffer, journal, self.wakeup, self._emit, settings)
        checkpointer = Checkpointer(
            ports.cluster.update,
            ports.ledger,
            ports.blobs,
            ports.checkpoints,
            self._emit,
            every_updates=settings.checkpoint_every_updates,
            keep=settings.checkpoint_keep,
            doing=training.doing,
        )
        return Loops(ports, settings, buffer, journal, evaluator, publisher, rollout, training, checkpointer)

    async def _watch(self, loops: Loops) -> None:
        """Notices ranks that are lost and come back."""
        while True:
            change = await self.ports.cluster.next_change()
            replicas = [r for r, ranks in self.ports.cluster.engine_ranks.items() if change.rank in ranks]
            if not change.lost:
                self._emit(RankBack(t_s=_now(), rank=change.rank))
                for replica in replicas:
                    loops.publisher.back(replica)
                if change.rank in loops.training.ranks:
                    loops.restorer.back()
                continue
            tasks = sum(loops.rollout.training_tasks[r] + loops.rollout.eval_tasks[r] for r in replicas)
            self._emit(RankLostEvent(t_s=_now(), rank=change.rank, reason=change.reason, tasks=tasks))
            for replica in replicas:
                loops.publisher.lost(replica)
            if change.rank in loops.training.ranks:
                loops.restorer.lost()

    def _emit(self, event: Event) -> None:
        self.ports.recorder.emit(event)


@dataclass
class Loops:
    """The parts of a run in progress, and what needs several of them."""

    ports: Ports
    settings: RunSettings
    buffer: Buffer
    journal: Journal
    evaluator: Evaluator
    publisher: Publisher
    rollout: Rollout
    training: Training
    checkpointer: Checkpointer
    evaluations_due: int = -1
    """The newest update whose evaluation has been asked for, or need not be."""

    @property
    def restorer(self) -> TrainerRestorer:
        return self.training.restorer

    async def resume(self, recovered: Recovered, train_prompts: Sequence[Prompt]) -> None:
        """Goes on where the journal ends: the trainer's state, the books, the groups; what was in flight is issued
        again."""
        by_id = {prompt.id: prompt for prompt in train_prompts}
        buffer = self.buffer
        buffer.updates_done = recovered.updates_done
        buffer.started_groups = recovered.started_groups
        buffer.next_prompt_id = recovered.next_prompt_id
        buffer.next_trajectory_id = recovered.next_trajectory_id
        self.evaluations_due = recovered.updates_done - 1
        self.checkpointer.adopt(
            recovered.checkpoints,
            [(number, [row.sha256 for row in rows if row.sha256]) for number, rows in recovered.updates],
        )
        redone = {row.sha256 for _, rows in recovered.updates for row in rows}
        ready = {row.sha256 for group in recovered.groups for row in group.members}
        await self.ports.blobs.keep_only({sha256 for sha256 in redone | ready if sha256 is not None})
        await self.restorer.guarded(lambda: self.restorer.restore(recovered))
        for live in recovered.groups:
            group, lost = await load_group(
                live,
                by_id,
                self.ports.blobs,
                last_update=deadline(live.prompt.start_version, buffer.max_staleness, buffer.counts),
                updates_done=buffer.updates_done,
            )
            buffer.restore(group, asyncio.get_running_loop().time())
            for member in lost:
                self.rollout.refill(group, member, "lost", 0)

    async def committed(self, update: int, batch: Sequence[Group]) -> None:
        """After an update: publish, then make it durable."""
        self.rollout.kv.trained(*self.training.last_step_s)
        last = update == self.settings.updates
        if update % self.settings.publish_every_updates == 0 or last:
            await self.publish(update)
        hashes = [m.sha256 for group in batch for m in group.members if m.sha256 is not None]
        await self.restorer.guarded(lambda: self.checkpointer.consumed(update, hashes))

    async def publish(self, version: int) -> None:
        """Publishes this version, and asks for its evaluation if one is due: at the start, at the end, and every so
        often."""
        every = self.settings.evaluation.every_updates
        edge = version == 0 or version >= self.settings.updates
        if edge or (every > 0 and version // every > self.evaluations_due // every):
            await self._keep_candidate(version)
            self.evaluator.begin(version)
            self.evaluations_due = version
        self.journal.published(version)
        with self.training.doing("publishing"):
            await self.restorer.guarded(lambda: self.publisher.publish(version))

    async def _keep_candidate(self, version: int) -> None:
        """Saves the trainer's model, which is this version now and a later one when the evaluation is done."""
        models = self.ports.models
        if models is None or not self.evaluator.prompts:
            return
        try:
            await self.restorer.guarded(lambda: self.ports.cluster.update.save_model(models.path(version)))
        except CheckpointError as error:
            now = asyncio.get_running_loop().time()
            self.evaluator.emit(Fault(t_s=now, where="best model", what=type(error).__name__))

    def check_progress(self) -> None:
        """Raises `DeadlockError` when no task is in flight, none can start, no load can start and no batch can be
        made."""
        if self.rollout.in_flight or not self.training.waiting or self.training.stopping:
            return
        if self.publisher.may_progress() or not all(self.publisher.up.values()) or self.training.may_go_on():
            return
        waiting = [
            f"prompt {g.prompt_id}" + ("" if g.deadline == NO_DEADLINE else f" (due by update {g.deadline + 1})")
            for g in self.buffer.groups.values()
            if not g.ready
        ]
        raise DeadlockError(
            f"the trainer waits for update {self.buffer.updates_done + 1} with {len(self.buffer.ready_groups)} ready "
            f"groups of {self.buffer.batch_groups}; rollout is blocked by {self.rollout.blocked}; versions loaded: "
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
