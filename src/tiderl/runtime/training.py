"""The consume loop: waits for a batch, drives reference and actor over its micro-batches, commits, publishes.

Keeps I2 (commit before publish; a version is published once), I3 (checked on every group before it is computed), I7 (an
update is the sum over its micro-batches, divided once, so it does not matter which group came when). Where the trainer
has a rank of its own it starts on the first ready groups and takes the others as they come (gated bursts: whenever it
is free, everything that is ready). Knows no tensors: log-probs pass through as arrays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from tiderl.data.errors import InvariantViolation, RankLost
from tiderl.data.events import (
    BackwardDone,
    Event,
    Fault,
    ForwardDone,
    MicrobatchFormed,
    RankState,
    ReferenceDone,
    RoleChanged,
    StepStarted,
    UpdateCommitted,
)
from tiderl.data.records import MicroBatch, UpdateStats
from tiderl.data.records import Sequence as TrainSequence
from tiderl.data.settings import RunSettings, StalenessCounts
from tiderl.runtime.buffer import Buffer, Group
from tiderl.runtime.journal import Journal
from tiderl.runtime.ports import Engine, Ports
from tiderl.runtime.restore import TrainerRestorer
from tiderl.runtime.wakeup import Wakeup
from tiderl.schedule.pipeline import shape_micro_batches, split_parts
from tiderl.schedule.signals import head_of_line_s, ready_microbatches


@dataclass(frozen=True)
class Staleness:
    """Of one consumed batch, in updates; `mean_tokens` is weighted by loss-bearing tokens."""

    maximum: int
    mean_tokens: float
    window_maximum: int

    def counted(self, counts: StalenessCounts) -> int:
        """The largest by the run's declared definition: what the bound holds for."""
        return self.maximum if counts == "oldest_token" else self.window_maximum


def batch_staleness(batch: Sequence[Group], update: int) -> Staleness:
    """At update `update` (from 1): (update - 1) - oldest version of a token; `window`: updates since the group was
    ready."""
    trajectories = [t for group in batch for t in group.trajectories()]
    ages = np.concatenate([(update - 1) - t.versions[t.loss_mask] for t in trajectories])
    return Staleness(
        maximum=int(ages.max()),
        mean_tokens=float(ages.mean()),
        window_maximum=max(update - 1 - group.ready_update for group in batch),
    )


SUMMED = ("tokens", "computed_tokens", "loss_tokens", "logprob_gap_tokens", "swap_to_reference_s", "swap_to_actor_s")
LARGEST = ("logprob_gap_max",)
GAP_MEAN, GAP_TOKENS = "logprob_gap_mean", "logprob_gap_tokens"


def combined_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of an update from those of its optimizer steps: counts are added, the largest gap is the largest, the
    mean gap is weighted by its tokens (steps after the first have none), everything else is the mean over the steps."""
    combined = {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in steps[0]}
    for name in combined:
        if name in SUMMED:
            combined[name] *= len(steps)
        elif name in LARGEST:
            combined[name] = max(step.get(name, 0.0) for step in steps)
    if combined.get(GAP_TOKENS):
        weighted = sum(step[GAP_MEAN] * step[GAP_TOKENS] for step in steps)
        combined[GAP_MEAN] = weighted / combined[GAP_TOKENS]
    return combined


def plan_update(
    update: int, batch: Sequence[Group], steps_per_batch: int, micro_batch_tokens: int
) -> list[list[MicroBatch]]:
    """The micro-batches of each optimizer step, numbered within the update."""
    parts: list[list[MicroBatch]] = []
    index = 0
    for part, which in enumerate(split_parts(len(batch), steps_per_batch)):
        parts.append(plan_micro_batches(update, part, index, [batch[i] for i in which], micro_batch_tokens))
        index += len(parts[-1])
    return parts


def plan_micro_batches(
    update: int, part: int, first_index: int, groups: Sequence[Group], micro_batch_tokens: int
) -> list[MicroBatch]:
    """The groups' sequences as micro-batches, numbered from `first_index`."""
    sequences: list[TrainSequence] = [s for group in groups for s in group.sequences()]
    shaped = shape_micro_batches([s.tokens for s in sequences], micro_batch_tokens)
    return [
        MicroBatch(update, part, first_index + offset, tuple(sequences[i] for i in chosen))
        for offset, chosen in enumerate(shaped)
    ]


@dataclass
class StreamedUpdate:
    """An update that computes groups as they come."""

    number: int
    batch: list[Group] = field(default_factory=list)
    micro_batches: list[MicroBatch] = field(default_factory=list)
    computed: int = 0
    """Of the micro-batches, on the trainer's state of life `life`."""
    life: int | None = None
    busy_s: float = 0.0
    waited_s: float = 0.0


class Training:
    """One update after the other."""

    def __init__(
        self,
        ports: Ports,
        buffer: Buffer,
        journal: Journal,
        wakeup: Wakeup,
        emit: Callable[[Event], None],
        settings: RunSettings,
    ) -> None:
        cluster = ports.cluster
        self.cluster, self.buffer, self.journal = cluster, buffer, journal
        self.wakeup, self.emit, self.settings = wakeup, emit, settings
        self.ranks = tuple(actor.rank for actor in cluster.actors)
        trains = set(self.ranks)
        self.shared_replicas = [r for r, ranks in cluster.engine_ranks.items() if trains.intersection(ranks)]
        self.shared_ranks = [rank for r in self.shared_replicas for rank in cluster.engine_ranks[r] if rank in trains]
        # A shared rank would stop generating for every burst. With several optimizer steps, the proximal policy of the
        # later ones is the model before the first, so all must have come before it.
        self.streams = (
            buffer.consumption != "whole_batch" and not self.shared_replicas and settings.steps_per_batch == 1
        )
        self._doing = ""
        self.restorer = TrainerRestorer(ports, self._redo, wakeup, emit, self.doing)
        self.reported_updates = 0
        """The newest update whose commit is among the events."""
        self.last_step_s = (0.0, 0.0)
        """Of the newest update: the wait for its data, and the work."""
        self.waiting = False
        self.stopping = False

    async def run(self, committed: Callable[[int, Sequence[Group]], Awaitable[None]]) -> None:
        """All updates of the run, or until `stop`. `committed(update, batch)`: publishing, and what else follows."""
        while self.buffer.updates_done < self.settings.updates:
            update = self.buffer.updates_done + 1
            batch = await (self._stream(update) if self.streams else self._whole(update))
            if not batch:
                return
            await committed(update, batch)

    def stop(self) -> None:
        """Finish the update that is being made, start no other."""
        self.stopping = True
        self.wakeup.notify()

    def may_go_on(self) -> bool:
        """True while there is something that the running or the next update can take."""
        return bool(self._available())

    def _available(self) -> list[Group]:
        return self.buffer.more() if self.streams else self.buffer.choose()

    async def _next_groups(self) -> tuple[list[Group], float]:
        """Groups to compute, none when the run is to stop; and the seconds waited for them."""
        since = _now()
        groups = self._available()
        if groups and not self.stopping:
            return groups, 0.0
        self._do("waiting_data")
        self.waiting = True
        self.wakeup.notify()  # the rollout loop looks for a deadlock, which there is only while the trainer waits
        try:
            while not self.stopping:
                groups = self._available()
                if groups:
                    return groups, _now() - since
                await self.wakeup.wait()
            return [], _now() - since
        finally:
            self.waiting = False

    async def _whole(self, update: int) -> list[Group]:
        """One update over a batch that is complete before it begins; none when the run is to stop."""
        batch, waited_s = await self._next_groups()
        if not batch:
            return []
        started = _now()
        self._emit_step(update, batch, waited_s)
        self._check_staleness(update, batch)
        self._do("training")
        try:
            stats = await self.restorer.guarded(lambda: self._compute(update, batch))
        finally:
            if self.shared_replicas:
                self._do("waiting_data")
        await self.journal.commit(update, batch)
        self._consumed(update, batch, stats, waited_s, _now() - started)
        return batch

    async def _stream(self, update: int) -> list[Group]:
        """One update that computes groups as they become ready; none when the run is to stop. What an update that is
        given up had taken stays in the books, ready: no weight has changed."""
        step = StreamedUpdate(update)
        while len(step.batch) < self.settings.global_batch_groups:
            groups, waited_s = await self._next_groups()
            if not groups:
                return []
            started = _now()
            step.waited_s += waited_s
            self._check_staleness(update, groups)
            if not step.batch:
                self._emit_step(update, groups, waited_s)
            self._do("training")
            self.buffer.take(groups)
            step.batch += groups
            first = len(step.micro_batches)
            step.micro_batches += plan_micro_batches(update, 0, first, groups, self.settings.micro_batch_tokens)
            self._emit_formed(step.micro_batches[first:])
            await self.restorer.guarded(lambda: self._compute_streamed(step))
            step.busy_s += _now() - started
        started = _now()
        stats = await self.restorer.guarded(lambda: self._finish_streamed(step))
        await self.journal.commit(update, step.batch)
        self._consumed(update, step.batch, [stats], step.waited_s, step.busy_s + _now() - started)
        return step.batch

    async def _compute_streamed(self, step: StreamedUpdate) -> None:
        """What is planned and not computed; after a loss of the rank, all of it."""
        if step.life != self.restorer.life:
            await self.cluster.update.begin(step.number, self.ranks)
            step.life, step.computed = self.restorer.life, 0
        burst = step.micro_batches[step.computed :]
        await self._micro_batches(burst)
        step.computed += len(burst)

    async def _finish_streamed(self, step: StreamedUpdate) -> UpdateStats:
        await self._compute_streamed(step)
        return await self.cluster.update.finish()

    def _check_staleness(self, update: int, batch: Sequence[Group]) -> None:
        """Raises `InvariantViolation` before a stale token is trained."""
        stale = batch_staleness(batch, update).counted(self.settings.staleness_counts)
        if stale > self.settings.max_staleness:
            raise InvariantViolation(
                f"update {update} would train what is {stale} updates old by {self.settings.staleness_counts}, the "
                f"bound is {self.settings.max_staleness} (I3)"
            )

    def _consumed(
        self, update: int, batch: Sequence[Group], stats: Sequence[UpdateStats], waited_s: float, seconds: float
    ) -> None:
        """The update is committed."""
        self.last_step_s = (waited_s, seconds)
        self._emit_committed(update, batch, stats, waited_s, seconds)
        self.buffer.consume(batch)
        self.wakeup.notify()

    async def _redo(self, update: int, batch: Sequence[Group]) -> None:
        """A committed update once more, from its record. Reported only where the driver died between its commit and the
        event."""
        started = _now()
        stats = await self._compute(update, batch)
        if update > self.reported_updates:
            self._emit_committed(update, batch, stats, 0.0, _now() - started)

    async def _compute(self, update: int, batch: Sequence[Group]) -> list[UpdateStats]:
        """On a rank that is taken for it, each time anew: one that was lost is back with an engine that generates."""
        parts = plan_update(update, batch, self.settings.steps_per_batch, self.settings.micro_batch_tokens)
        self._emit_formed([mb for part in parts for mb in part])
        await self._take_rank()
        try:
            return await self._compute_parts(update, parts)
        finally:
            await self._give_rank_back()

    async def _compute_parts(self, update: int, parts: Sequence[Sequence[MicroBatch]]) -> list[UpdateStats]:
        actor, stats = self.cluster.actors[0], []
        if len(parts) > 1:
            for mb in (mb for part in parts for mb in part):
                await actor.forward(mb, proximal=True)
        for part in parts:
            await self.cluster.update.begin(update, self.ranks)
            await self._micro_batches(part)
            stats.append(await self.cluster.update.finish())
        return stats

    async def _micro_batches(self, burst: Sequence[MicroBatch]) -> None:
        """The reference for all of them, then the actor: where only one fits, each is loaded once a burst."""
        actor, started = self.cluster.actors[0], _now()
        references: list[np.ndarray | None] = [None] * len(burst)
        if self.settings.uses_reference:
            with self.doing("reference"):
                for index, mb in enumerate(burst):
                    references[index] = await self.cluster.references[0].logprobs(mb)
                    self.emit(ReferenceDone(t_s=_now(), update=mb.update, index=mb.index, seconds=_now() - started))
                    started = _now()
        for mb, ref_logprobs in zip(burst, references, strict=True):
            await actor.forward(mb)
            self.emit(ForwardDone(t_s=_now(), update=mb.update, index=mb.index, seconds=_now() - started))
            started = _now()
            await actor.backward(mb, ref_logprobs)
            self.emit(BackwardDone(t_s=_now(), update=mb.update, index=mb.index, seconds=_now() - started))
            started = _now()

    async def _take_rank(self) -> None:
        """A rank that also holds an engine stops generating while it trains (I5)."""
        await self._each_shared_engine(lambda engine: engine.pause("keep"))
        for rank in self.shared_ranks:
            self.emit(RoleChanged(t_s=_now(), rank=rank, from_role="rollout", to_role="actor"))

    async def _give_rank_back(self) -> None:
        await self._each_shared_engine(lambda engine: engine.resume())
        for rank in self.shared_ranks:
            self.emit(RoleChanged(t_s=_now(), rank=rank, from_role="actor", to_role="rollout"))

    async def _each_shared_engine(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        async def one(engine: Engine) -> None:
            with suppress(RankLost):  # then it holds nothing that could generate
                await call(engine)

        async with asyncio.TaskGroup() as tasks:
            for replica in self.shared_replicas:
                tasks.create_task(one(self.cluster.engines[replica]), name=f"role of replica {replica}")

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """The trainer does this meanwhile, and what it did before afterwards. Within a restore all is restoring."""
        before = self._doing
        if before != "restoring":
            self._do(activity)
        try:
            yield
        finally:
            self._do(before or "waiting_data")

    def _do(self, activity: str) -> None:
        if activity != self._doing:
            self._doing = activity
            if activity:
                self.emit(RankState(t_s=_now(), rank=self.ranks[0], role="actor", activity=activity))

    def _emit_step(self, update: int, batch: Sequence[Group], waited_s: float) -> None:
        ready = self.buffer.ready_groups
        tokens = sum(t.trained_tokens for group in ready for t in group.trajectories())
        self.emit(
            StepStarted(
                t_s=_now(),
                update=update,
                prompt_ids=tuple(group.prompt_id for group in batch),
                waited_s=waited_s,
                ready_groups=len(ready),
                oldest_ready_s=head_of_line_s(_now(), [g.ready_s for g in ready if g.ready_s is not None]),
                ready_at_start_microbatches=ready_microbatches(tokens, self.settings.micro_batch_tokens),
            )
        )

    def _emit_formed(self, micro_batches: Sequence[MicroBatch]) -> None:
        for mb in micro_batches:
            self.emit(
                MicrobatchFormed(
                    t_s=_now(), update=mb.update, index=mb.index, sequences=len(mb.sequences), tokens=mb.tokens
                )
            )

    def _emit_committed(
        self, update: int, batch: Sequence[Group], stats: Sequence[UpdateStats], waited_s: float, seconds: float
    ) -> None:
        self.reported_updates = update
        staleness = batch_staleness(batch, update)
        trajectories = [t for group in batch for t in group.trajectories()]
        metrics = combined_metrics([s.metrics for s in stats])
        self.emit(
            UpdateCommitted(
                t_s=_now(),
                update=update,
                prompt_ids=tuple(group.prompt_id for group in batch),
                waited_s=waited_s,
                groups=len(batch),
                trajectories=len(trajectories),
                loss_tokens=sum(t.loss_tokens for t in trajectories),
                tokens=sum(t.trained_tokens for t in trajectories),
                reward_mean=sum(t.reward for t in trajectories) / len(trajectories),
                success_fraction=sum(t.success for t in trajectories) / len(trajectories),
                staleness_max=staleness.maximum,
                staleness_mean_tokens=staleness.mean_tokens,
                window_staleness_max=staleness.window_maximum,
                seconds=seconds,
                metrics=metrics,
            )
        )
        if metrics.get("logprob_gap_mean", 0.0) > self.settings.logprob_gap_alarm:
            self.emit(Fault(t_s=_now(), where=f"update {update}", what="LogprobGapAlarm"))


def _now() -> float:
    return asyncio.get_running_loop().time()
