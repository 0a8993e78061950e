"""The rollout loop: asks `schedule` what may start, starts it, and handles what comes back.

Keeps I1 (each member's end is written once), I9 (refills by member number) and structured concurrency: every task
lives in
this loop's TaskGroup. Decides nothing itself: admission is `schedule.tasks`, failures are `schedule.groups`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator

from tiderl.data.errors import (
    EnvironmentFault,
    HopelessEnvironment,
    InfrastructureFault,
    RankLost,
    TideError,
    VerifierFault,
)
from tiderl.data.events import Dropped, Event, Fault, GroupReady, PromptIssued, RankState, TaskAdmitted, TaskFinished
from tiderl.data.records import Prompt, TaskKey, Trajectory
from tiderl.runtime.buffer import Buffer, Group, Member
from tiderl.runtime.evaluation import EvalJob, Evaluator
from tiderl.runtime.journal import Journal
from tiderl.runtime.kv import KvPolicy, Next, RequestLevel, TaskLevel
from tiderl.runtime.loads import Loads
from tiderl.runtime.ports import Ports
from tiderl.runtime.sync import Publisher
from tiderl.runtime.task import TaskLimits, TaskPlayer
from tiderl.runtime.waiting import Waiting
from tiderl.runtime.wakeup import Wakeup
from tiderl.schedule.groups import FailureKind, FailureView, after_failure
from tiderl.schedule.staleness import StartView
from tiderl.schedule.tasks import AdmissionView, Blocked, KvRules, next_admission

EVAL_FAULT_RETRIES = 1
"""As for training: an environment fault is tried once more."""

FAULTS_IN_A_ROW_PER_SLOT = 2
FAULTS_IN_A_ROW_AT_LEAST = 50
"""Environment and verifier faults with no episode finished between them, after which the run ends: each slot had its
chance and its retry. Without a limit refills would go on for ever."""

DROPPED_BATCHES_IN_A_ROW = 4
"""Groups given up with none ready between them, in batches, after which the run ends: no update would ever come."""

TASK_FAULTS = (EnvironmentFault, VerifierFault, InfrastructureFault)


class Rollout:
    """Everything in flight, training and evaluation."""

    def __init__(
        self,
        ports: Ports,
        buffer: Buffer,
        journal: Journal,
        publisher: Publisher,
        evaluator: Evaluator,
        wakeup: Wakeup,
        prompts: Iterator[Prompt],
        emit: Callable[[Event], None],
        *,
        limits: TaskLimits,
        eval_limits: TaskLimits,
        group_size: int,
        slots: int,
        total_groups: int,
        kv: KvRules | None = None,
    ) -> None:
        """`kv`: the rules of continuous task batching; None leaves KV to the engines."""
        self.ports, self.buffer, self.journal = ports, buffer, journal
        self.publisher, self.evaluator, self.wakeup = publisher, evaluator, wakeup
        self.prompts, self.emit = prompts, emit
        self.limits, self.eval_limits = limits, eval_limits
        self.group_size, self.slots, self.total_groups = group_size, slots, total_groups
        self.waiting = Waiting()
        self.training_tasks = dict.fromkeys(ports.cluster.engines, 0)
        self.eval_tasks = dict.fromkeys(ports.cluster.engines, 0)
        self.group_tasks: dict[int, list[asyncio.Task[None]]] = {}
        self.players: dict[int, TaskPlayer] = {}  # by trajectory id
        self.losses_known: dict[tuple[int, TaskKey], int] = {}  # of a task's replica when it came there
        self.faults_in_a_row = 0
        self.groups_dropped_in_a_row = 0
        self.blocked = ""
        self.loads = Loads(ports.cluster.engines)
        self.kv: KvPolicy = RequestLevel(ports.cluster.engines, self.loads)
        if kv is not None:
            self.kv = TaskLevel(
                ports.cluster.engines,
                self.loads,
                buffer,
                kv,
                emit,
                changed=wakeup.notify,
                moved=self._moved,
                ready=self._ready,
            )
        self._activity: dict[int, str] = {}
        self._restless = dict.fromkeys(ports.cluster.engine_ranks)  # whose activity may have changed
        self._idle: dict[int, None] = {}
        self._idle_as = ""

    @property
    def in_flight(self) -> int:
        return self.loads.total

    def busy(self, replica: int) -> bool:
        return self.training_tasks[replica] > 0

    async def run(self, check_progress: Callable[[], None]) -> None:
        """Until cancelled. `check_progress` is called before each wait, and raises when nothing can ever happen
        again."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._admit(tasks)
                self.kv.rebalance()
                self._report_activity()
                check_progress()
                await self.wakeup.wait()

    def _admit(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            decision = next_admission(self._view())
            if isinstance(decision, Blocked):
                self.blocked = decision.reason
                return
            if decision.what == "eval":
                self._start_eval(tasks, decision.replica)
            elif decision.what == "member":
                self._start_member(tasks, *self.waiting.take(), decision.replica)
            elif decision.what == "own":
                self._start_member(tasks, *self.waiting.take(decision.replica), decision.replica)
            else:
                self._start_group(decision.replica)

    def _view(self) -> AdmissionView:
        changed, self.publisher.changed = self.publisher.changed, []
        for replica in changed:
            version = self.publisher.usable_version(replica)
            self.loads.usable(replica, version)
            self.kv.usable(replica, version, self.publisher.up[replica])
            self._restless[replica] = None
        first = self.waiting.first()
        start = StartView(
            started_groups=self.buffer.started_groups,
            total_groups=self.total_groups,
            global_batch_groups=self.buffer.batch_groups,
            max_staleness=self.buffer.max_staleness,
            counts=self.buffer.counts,
            updates_done=self.buffer.updates_done,
        )
        return AdmissionView(
            free_slots=self.slots - self.in_flight,
            replicas=self.kv.replicas(Next(self.evaluator.waiting_prompt(), first, self.waiting.first), start),
            eval_version=self.evaluator.waiting_version(),
            member_min_version=first[0].start_version if first else None,
            start=start,
            replica_slots=-(-self.slots // len(self.training_tasks)),
            member_home=self.kv.home(first[0]) if first else None,
            home_lead=self.group_size,
        )

    def _count(self, tasks: dict[int, int], replica: int, change: int) -> None:
        tasks[replica] += change
        self.loads.add(replica, change)
        self._restless[replica] = None
        if change < 0:
            self.publisher.ask(replica)

    def _start_group(self, replica: int) -> None:
        """Opens the next prompt's group at this replica's version; its members wait for admission like any other."""
        version = self.publisher.loaded[replica]
        group = self.buffer.start(next(self.prompts), version, self.group_size, replica)
        self.journal.issued(group)
        self.emit(
            PromptIssued(
                t_s=_now(),
                prompt_id=group.prompt_id,
                task_id=group.prompt.id,
                start_version=version,
                replica=replica,
                environment=group.prompt.environment,
            )
        )
        self._ready(group, self.kv.first_members(group))

    def _ready(self, group: Group, members: Collection[Member]) -> None:
        """These members may start."""
        self.waiting.add(group, members)
        self.wakeup.notify()

    def _moved(self, key: TaskKey, replica: int, to: int) -> None:
        """A task goes on elsewhere."""
        self._count(self.training_tasks, replica, -1)
        self._count(self.training_tasks, to, 1)
        del self.losses_known[replica, key]
        self.losses_known[to, key] = self.publisher.losses[to]

    def _start_member(self, tasks: asyncio.TaskGroup, group: Group, member: Member, replica: int) -> None:
        key = TaskKey("train", group.prompt_id, member.number, member.attempt)
        player = self._player(key, member.trajectory_id, group.prompt, replica, group, self.limits)
        task = tasks.create_task(self._run_member(group, member, player), name=f"task {key}")
        self._charge(task, self.training_tasks, player, replica)
        self.group_tasks.setdefault(group.prompt_id, []).append(task)
        self._emit_admitted(key, member.trajectory_id, replica)

    def _start_eval(self, tasks: asyncio.TaskGroup, replica: int) -> None:
        job, key = self.evaluator.take(replica)
        if not job.waiting:
            self.publisher.ask_all()
        player = self._player(key, -1, self.evaluator.prompts[key.prompt_id], replica, None, self.eval_limits)
        task = tasks.create_task(self._run_eval(job, player, replica), name=f"task {key}")
        self._charge(task, self.eval_tasks, player, replica)
        self._emit_admitted(key, -1, replica)

    def _charge(self, task: asyncio.Task[None], tasks: dict[int, int], player: TaskPlayer, replica: int) -> None:
        """The task takes a slot and a seat of the replica until it ends. Its own `finally` would not do: one that is
        cancelled before its first step never gets there."""

        def credit(_: asyncio.Task[None]) -> None:
            at = player.seat.engine.replica
            player.seat.close()
            del self.losses_known[at, player.key]
            self._count(tasks, at, -1)
            self.wakeup.notify()

        self._count(tasks, replica, 1)
        self.losses_known[replica, player.key] = self.publisher.losses[replica]
        task.add_done_callback(credit)

    def _player(
        self,
        key: TaskKey,
        trajectory_id: int,
        prompt: Prompt,
        replica: int,
        group: Group | None,
        limits: TaskLimits,
    ) -> TaskPlayer:
        return TaskPlayer(
            key=key,
            trajectory_id=trajectory_id,
            prompt=prompt,
            limits=limits,
            seat=self.kv.seat(key, replica, prompt, group),
            environments=self.ports.environments,
            renderer=self.ports.renderer,
            emit=self.emit,
        )

    def _suspect(self, player: TaskPlayer) -> None:
        at = player.seat.engine.replica
        self.publisher.suspect(at, self.losses_known[at, player.key])

    async def _run_member(self, group: Group, member: Member, player: TaskPlayer) -> None:
        self.players[member.trajectory_id] = player
        try:
            trajectory = await player.play()
            self.faults_in_a_row = 0
            await self._finished(group, member, trajectory)
        except TASK_FAULTS as fault:
            if isinstance(fault, RankLost):
                self._suspect(player)
            self._count_fault(fault)
            self._failed(group, member, fault, player.record.length)
        finally:
            self.players.pop(player.trajectory_id, None)

    async def _run_eval(self, job: EvalJob, player: TaskPlayer, replica: int) -> None:
        key = player.key
        try:
            trajectory = await player.play()
        except TASK_FAULTS as fault:
            if isinstance(fault, RankLost):
                self._suspect(player)
            self._emit_fault("evaluation", fault, key)
            again = isinstance(fault, InfrastructureFault) or key.attempt < EVAL_FAULT_RETRIES
            self.evaluator.failed(job, replica, key, again=again)
        else:
            self._emit_finished(trajectory)
            self.evaluator.finished(job, replica, trajectory)

    async def _finished(self, group: Group, member: Member, trajectory: Trajectory) -> None:
        sha256 = await self.journal.store(trajectory)
        self.journal.ready(group, member, sha256, self.buffer.updates_done)
        self._emit_finished(trajectory)
        if self.buffer.fill(group, member, trajectory, sha256, _now()):
            del self.group_tasks[group.prompt_id]
            self.groups_dropped_in_a_row = 0
            done = group.trajectories()
            self.emit(
                GroupReady(
                    t_s=_now(),
                    prompt_id=group.prompt_id,
                    start_version=group.start_version,
                    deadline=group.deadline,
                    mean_reward=sum(t.reward for t in done) / len(done),
                    loss_tokens=sum(t.loss_tokens for t in done),
                )
            )

    def _failed(self, group: Group, member: Member, fault: TideError, tokens: int) -> None:
        """Retry, refill or give the group up; every way is written before the next start."""
        self._emit_fault("task", fault, TaskKey("train", group.prompt_id, member.number, member.attempt))
        if group.prompt_id not in self.buffer.groups:
            return
        kind: FailureKind = "infrastructure"
        if isinstance(fault, EnvironmentFault):
            kind = "environment"
        elif isinstance(fault, VerifierFault):
            kind = "verifier"
        verdict = after_failure(FailureView(kind, member.retries, group.refills))
        if verdict == "drop_group":
            self._drop_group(group, member, fault.reason, tokens)
            self._count_dropped_group(fault)
            return
        if verdict == "retry":
            member.retries += 1
            member.attempt += 1
            self.journal.retried(group, member)
            self.waiting.add_first(group, member)
            return
        group.refills += kind != "infrastructure"
        self.refill(group, member, fault.reason, tokens)

    def _count_fault(self, fault: TideError) -> None:
        """Raises `HopelessEnvironment` when nothing but faults came back for too long."""
        if isinstance(fault, InfrastructureFault):
            return
        self.faults_in_a_row += 1
        if self.faults_in_a_row >= max(FAULTS_IN_A_ROW_AT_LEAST, FAULTS_IN_A_ROW_PER_SLOT * self.slots):
            raise HopelessEnvironment(
                f"{self.faults_in_a_row} episodes in a row failed, the last with {type(fault).__name__}: {fault.what}",
                where=fault.where,
                hint="try the environment alone: tiderl env check NAME",
            )

    def _count_dropped_group(self, fault: TideError) -> None:
        """Raises `HopelessEnvironment` when only groups that fail have come for too long."""
        self.groups_dropped_in_a_row += 1
        if self.groups_dropped_in_a_row >= DROPPED_BATCHES_IN_A_ROW * self.buffer.batch_groups:
            raise HopelessEnvironment(
                f"{self.groups_dropped_in_a_row} groups in a row were given up, the last for {type(fault).__name__}: "
                f"{fault.what}",
                where=fault.where,
                hint="too many episodes fail for a whole group to finish: try tiderl env check NAME",
            )

    def _spent(self, member: Member) -> int:
        """Tokens of a member's trajectory so far, finished or running."""
        if member.trajectory is not None:
            return member.trajectory.tokens
        player = self.players.get(member.trajectory_id)
        return player.record.length if player is not None else 0

    def refill(self, group: Group, member: Member, reason: str, tokens: int) -> None:
        """Drops the member's trajectory and puts a new one in its place, first in the queue."""
        new = Member(member.number, self.buffer.new_trajectory_id(), attempt=member.attempt + 1)
        self.journal.refilled(group, member, reason, new)
        self._emit_dropped(group, member, reason, tokens)
        group.members[member.number] = new
        self.waiting.add_first(group, new)

    def _drop_group(self, group: Group, failed: Member, reason: str, tokens: int) -> None:
        """The prompt is given up: its other members are cancelled, finished ones included."""
        reasons = [reason if member is failed else "group_dropped" for member in group.members]
        self.journal.group_dropped(group, reasons)
        for member, why in zip(group.members, reasons, strict=True):
            self._emit_dropped(group, member, why, tokens if member is failed else self._spent(member))
        self.buffer.drop(group)
        self.kv.forget(group)
        self.waiting.forget(group)
        current = asyncio.current_task()
        for task in self.group_tasks.pop(group.prompt_id):
            if task is not current:
                task.cancel()

    def _emit_dropped(self, group: Group, member: Member, reason: str, tokens: int) -> None:
        self.emit(
            Dropped(
                t_s=_now(),
                trajectory_id=member.trajectory_id,
                prompt_id=group.prompt_id,
                member=member.number,
                reason=reason,
                tokens=tokens,
            )
        )

    def _report_activity(self) -> None:
        """What each replica does now, as far as the schedule can know: an event at every change."""
        idle = "idle_staleness" if self.blocked == "staleness" else "idle_no_work"
        if self._idle and idle != self._idle_as:
            self._restless.update(self._idle)
        self._idle_as = idle
        restless, self._restless = self._restless, {}
        for replica in sorted(restless):
            if replica in self.publisher.loading:
                activity = "loading"
            elif self.training_tasks[replica]:
                activity = "generating"
            elif self.eval_tasks[replica]:
                activity = "evaluating"
            elif not self.publisher.up[replica]:
                activity = "stopped"
            else:
                activity = idle
            if activity == idle:
                self._idle[replica] = None
            else:
                self._idle.pop(replica, None)
            if self._activity.get(replica) != activity:
                self._activity[replica] = activity
                for rank in self.ports.cluster.engine_ranks[replica]:
                    self.emit(RankState(t_s=_now(), rank=rank, role="rollout", activity=activity))

    def _emit_admitted(self, key: TaskKey, trajectory_id: int, replica: int) -> None:
        self.emit(
            TaskAdmitted(
                t_s=_now(),
                split=key.split,
                trajectory_id=trajectory_id,
                prompt_id=key.prompt_id,
                member=key.member,
                attempt=key.attempt,
                replica=replica,
            )
        )

    def _emit_finished(self, trajectory: Trajectory) -> None:
        self.emit(
            TaskFinished(
                t_s=_now(),
                split=trajectory.key.split,
                trajectory_id=trajectory.id,
                prompt_id=trajectory.key.prompt_id,
                member=trajectory.key.member,
                attempt=trajectory.key.attempt,
                ending=trajectory.ending,
                reward=trajectory.reward,
                success=trajectory.success,
                turns=len(trajectory.turns),
                tokens=trajectory.tokens,
                loss_tokens=trajectory.loss_tokens,
                oldest_version=trajectory.oldest_version,
            )
        )

    def _emit_fault(self, where: str, fault: TideError, key: TaskKey) -> None:
        self.emit(Fault(t_s=_now(), where=where, what=type(fault).__name__, prompt_id=key.prompt_id, member=key.member))


def _now() -> float:
    return asyncio.get_running_loop().time()
