"""A slow, obvious scheduler: one iteration at a time, random legal decisions, every rule written out.

The oracle for the clairvoyant bound: whatever it decides, its run must not be faster than the bound. It shares no code
with `cost` beyond the descriptions of work and resources. A `Habits` value is one way of deciding; `cheat_updates` lets
it break the staleness rule on purpose.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiderl.cost.model import CostModel
from tiderl.cost.resources import Resources
from tiderl.cost.work import GroupWork, TrajectoryWork


@dataclass(frozen=True)
class Habits:
    """How this scheduler decides. All of it is legal, some of it is foolish."""

    start: str = "fifo"  # fifo | random | longest | shortest
    laziness: float = 0.0  # probability of passing over a task that could be admitted
    scatter: bool = False  # members of a group on any replica, else all on the group's own
    keeps_kv: bool = True  # while the environment works
    recomputes: bool = True  # after a new version
    resets_early: bool = False  # before staleness lets the group start
    in_order: bool = False  # update u takes the u-th batch in issue order
    chunk_tokens: int = 64
    reference_ahead: bool = False
    cheat_updates: int = 0


@dataclass(eq=False)
class Task:
    group: int
    work: TrajectoryWork
    turn: int = 0
    sampled: int = 0  # in this turn
    own_tokens: int = 0  # its context beyond the common prompt, counted up to the last sampled token
    computed: int = 0  # of them in KV
    replica: int = -1
    resident: bool = False
    working: bool = False  # in an iteration now
    is_reset: bool = False
    holds_slot: bool = False

    @property
    def final_tokens(self) -> int:
        return sum(turn.prefill_tokens + turn.decode_tokens - 1 for turn in self.work.turns)


@dataclass(eq=False)
class Group:
    number: int
    work: GroupWork
    tasks: list[Task] = field(default_factory=list)
    start_version: int | None = None
    unfinished: int = 0
    taken: bool = False
    trained_at: int | None = None
    referenced: bool = False
    home: int = 0


@dataclass(eq=False)
class Replica:
    number: int
    version: int = 0
    target: int = 0  # newest version that has arrived
    busy: bool = False
    tasks: list[Task] = field(default_factory=list)  # resident
    prompts: dict[int, int] = field(default_factory=dict)  # group -> prompt positions computed


class SlowScheduler:
    """One run; `seconds()` plays it to its last commit."""

    def __init__(
        self,
        groups: Sequence[GroupWork],
        cost: CostModel,
        resources: Resources,
        habits: Habits,
        rng: random.Random,
        *,
        with_reference: bool = True,
    ) -> None:
        self.cost, self.resources, self.habits, self.rng = cost, resources, habits, rng
        self.with_reference = with_reference
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.replicas = [Replica(number) for number in range(resources.rollout_ranks)]
        self.groups = [Group(number, work) for number, work in enumerate(groups)]
        for group in self.groups:
            group.tasks = [Task(group.number, work) for work in group.work.trajectories]
            group.unfinished = len(group.tasks)
            group.home = group.number % len(self.replicas)
        self.order = self._start_order()
        self.waiting: list[Task] = []  # want a replica
        self.free_slots = resources.env_slots if resources.env_slots is not None else 10**9
        self.slot_queue: list[Callable[[], None]] = []
        self.updates = self.taken = 0
        self.training = self.waking = False
        self.published: list[int] = []
        self.link_busy = False
        self.commits: list[float] = []

    # ---------------------------------------------------------------- the clock

    def at(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), then))

    def seconds(self) -> float:
        if self.habits.resets_early:
            for group in self.order:
                self._reset(group)
        self._step()
        while self.updates < self.resources.updates:
            self.now, _, then = heapq.heappop(self.events)
            then()
            self._step()
        return self.now

    def _step(self) -> None:
        """Everything that can happen now."""
        self._start_groups()
        self._train()
        for replica in self.rng.sample(self.replicas, len(self.replicas)):
            self._iterate(replica)

    # ---------------------------------------------------------------- starts and environments

    def _start_order(self) -> list[Group]:
        def length(group: Group) -> float:
            return max(sum(turn.decode_tokens + turn.env_s for turn in task.work.turns) for task in group.tasks)

        match self.habits.start:
            case "random":
                return self.rng.sample(self.groups, len(self.groups))
            case "longest":
                return sorted(self.groups, key=length, reverse=True)
            case "shortest":
                return sorted(self.groups, key=length)
        return list(self.groups)

    def _may_start(self, version: int) -> bool:
        eta = self.resources.max_staleness + self.habits.cheat_updates
        started = sum(group.start_version is not None for group in self.groups)
        return started < (version + eta + 1) * self.resources.batch_groups

    def _start_groups(self) -> None:
        for group in self.order:
            if group.start_version is not None:
                continue
            version = min(replica.version for replica in self.replicas)
            if not self._may_start(version):
                return
            group.start_version = version
            if not self.habits.resets_early:
                self._reset(group)
            else:
                self.waiting += [task for task in group.tasks if task.is_reset]

    def _reset(self, group: Group) -> None:
        for task in group.tasks:
            self._with_slot(task, task.work.reset_s, lambda task=task: self._was_reset(task))  # type: ignore[misc]

    def _was_reset(self, task: Task) -> None:
        task.is_reset = True
        task.own_tokens = task.work.turns[0].prefill_tokens
        if self.groups[task.group].start_version is not None:
            self.waiting.append(task)

    def _with_slot(self, task: Task, seconds: float, then: Callable[[], None]) -> None:
        """`seconds` of the environment, in a slot that the task holds already or takes now."""

        def begin() -> None:
            task.holds_slot = True
            self.at(seconds, end)

        def end() -> None:
            if self.resources.slots_held == "step":
                self._give_slot(task)
            then()

        if task.holds_slot:
            self.at(seconds, end)
        elif self.free_slots > 0:
            self.free_slots -= 1
            begin()
        else:
            self.slot_queue.append(begin)

    def _give_slot(self, task: Task) -> None:
        task.holds_slot = False
        if self.slot_queue:
            self.slot_queue.pop(0)()
        else:
            self.free_slots += 1

    # ---------------------------------------------------------------- rollout

    def _used(self, replica: Replica) -> int:
        prompts = sum(self.groups[number].work.prompt_tokens for number in replica.prompts)
        return prompts + sum(task.final_tokens for task in replica.tasks)

    def _admit(self, replica: Replica) -> None:
        for task in list(self.waiting):
            group = self.groups[task.group]
            if task.replica not in (-1, replica.number) and self.habits.keeps_kv:
                continue
            if not self.habits.scatter and group.home != replica.number:
                continue
            if self.rng.random() < self.habits.laziness:
                self._look_again()
                continue
            prompt = 0 if task.group in replica.prompts else group.work.prompt_tokens
            if self._used(replica) + prompt + task.final_tokens > self.resources.kv_tokens:
                continue
            self.waiting.remove(task)
            replica.prompts.setdefault(task.group, 0)
            replica.tasks.append(task)
            task.replica, task.resident, task.working = replica.number, True, True

    def _look_again(self) -> None:
        """A lazy scheduler wakes up by itself, or nobody would."""

        def wake() -> None:
            self.waking = False

        if not self.waking:
            self.waking = True
            self.at(self.cost.iteration_s, wake)

    def _leave(self, replica: Replica, task: Task) -> None:
        replica.tasks.remove(task)
        task.resident, task.computed = False, 0
        if all(other.group != task.group for other in replica.tasks):
            del replica.prompts[task.group]

    def _iterate(self, replica: Replica) -> None:
        if replica.busy or (self.resources.shared_ranks and self.training):
            return
        self._admit(replica)
        cost, room = self.cost, self.habits.chunk_tokens
        prefilled = context = 0
        prompts: list[tuple[int, int]] = []
        parts: list[tuple[Task, int]] = []
        sampling: list[Task] = []
        present = [task for task in replica.tasks if task.working]
        for task in self.rng.sample(present, len(present)):
            group = self.groups[task.group]
            left = group.work.prompt_tokens - replica.prompts[task.group]
            if left > 0:
                if room > 0 and all(number != task.group for number, _ in prompts):
                    prompts.append((task.group, min(left, room)))
                    prefilled += min(left, room)
                    room -= min(left, room)
                continue
            missing = task.own_tokens - task.computed
            is_decoding = missing <= 0
            if is_decoding and len(sampling) < self.resources.max_batch:
                sampling.append(task)
                context += group.work.prompt_tokens + task.computed
            elif missing > 0 and room > 0:
                tokens = min(missing, room)
                if tokens == missing:
                    if len(sampling) >= self.resources.max_batch:
                        continue
                    sampling.append(task)
                parts.append((task, tokens))
                prefilled += tokens
                room -= tokens
        if not (prompts or parts or sampling):
            return
        seconds = cost.iteration_s + cost.sequence_s * len(sampling)
        seconds += cost.context_token_s * context + cost.prefill_token_s * prefilled
        replica.busy = True
        self.at(seconds, lambda: self._iterated(replica, prompts, parts, sampling))

    def _iterated(
        self,
        replica: Replica,
        prompts: list[tuple[int, int]],
        parts: list[tuple[Task, int]],
        sampling: list[Task],
    ) -> None:
        replica.busy = False
        for number, tokens in prompts:
            replica.prompts[number] += tokens
        for task, tokens in parts:
            task.computed += tokens
        for task in sampling:
            task.sampled += 1
            turn = task.work.turns[task.turn]
            if task.sampled == turn.decode_tokens:
                self._turn_over(replica, task)
            else:
                # Its KV is computed by the iteration that samples the next token.
                task.own_tokens += 1
                task.computed += 1
        self._load(replica)

    def _turn_over(self, replica: Replica, task: Task) -> None:
        turn = task.work.turns[task.turn]
        task.working = False
        last = task.turn == len(task.work.turns) - 1
        if last or not self.habits.keeps_kv:
            self._leave(replica, task)
        self._with_slot(task, turn.env_s, lambda: self._environment_answered(task, last))

    def _environment_answered(self, task: Task, last: bool) -> None:
        if last:
            if task.holds_slot:
                self._give_slot(task)
            self.groups[task.group].unfinished -= 1
            return
        task.turn += 1
        task.sampled = 0
        task.own_tokens += task.work.turns[task.turn].prefill_tokens
        if task.resident:
            task.working = True
        else:
            self.waiting.append(task)

    # ---------------------------------------------------------------- training

    def _due(self, group: Group) -> int:
        assert group.start_version is not None
        return group.start_version + self.resources.max_staleness + self.habits.cheat_updates

    def _may_take(self, group: Group) -> bool:
        """Taking `group` now leaves room for all that fall due (Hall's condition), counted one by one."""
        if self.habits.in_order:
            return group.number == self.updates * self.resources.batch_groups + self.taken
        started = [g for g in self.groups if g.start_version is not None and g.trained_at is None and not g.taken]
        size = self.resources.batch_groups
        for update in range(self.updates, self._due(group)):
            due = sum(self._due(other) <= update for other in started)
            if due > (update - self.updates + 1) * size - (self.taken + 1):
                return False
        return True

    def _train(self) -> None:
        if self.training or self.updates == self.resources.updates:
            return
        ready = [g for g in self.groups if g.start_version is not None and not g.unfinished and not g.taken]
        ready = sorted((g for g in ready if g.trained_at is None), key=lambda g: (self._due(g), g.number))
        if self.resources.streaming:
            for group in ready:
                if self._may_take(group):
                    self._take([group])
                    return
            if self.habits.reference_ahead and not self.resources.shared_ranks:
                for group in ready:
                    if not group.referenced:
                        group.referenced = True
                        self._work(self._reference_s(group), lambda: None)
                        return
            return
        batch: list[Group] = []
        for group in ready:
            if len(batch) < self.resources.batch_groups and self._may_take(group):
                group.taken = True
                self.taken += 1
                batch.append(group)
        for group in batch:
            group.taken = False
        self.taken = 0
        if len(batch) == self.resources.batch_groups:
            self._take(batch)

    def _take(self, batch: list[Group]) -> None:
        seconds = 0.0
        for group in batch:
            group.taken = True
            self.taken += 1
            seconds += self._tokens(group) * self.cost.actor_token_s
            seconds += 0.0 if group.referenced else self._reference_s(group)
        whole = self.taken == self.resources.batch_groups
        self._work(seconds, self._commit if whole else lambda: None, self.resources.update_s if whole else 0.0)

    def _reference_s(self, group: Group) -> float:
        return self._tokens(group) * self.cost.reference_token_s if self.with_reference else 0.0

    def _tokens(self, group: Group) -> int:
        return sum(group.work.prompt_tokens + task.final_tokens + 1 for task in group.tasks)

    def _work(self, rank_seconds: float, then: Callable[[], None], step_s: float = 0.0) -> None:
        """All trainer ranks together; with elastic roles after every replica has stopped."""
        self.training = True

        def begin() -> None:
            if self.resources.shared_ranks and any(replica.busy for replica in self.replicas):
                self.at(min(event[0] for event in self.events) - self.now, begin)
                return
            self.at(rank_seconds / self.resources.trainer_ranks + step_s, done)

        def done() -> None:
            self.training = False
            then()

        begin()

    def _commit(self) -> None:
        for group in self.groups:
            if group.taken:
                group.taken, group.trained_at = False, self.updates
                assert self.updates - (group.start_version or 0) <= self.resources.max_staleness + (
                    self.habits.cheat_updates
                )
        self.updates += 1
        self.taken = 0
        self.commits.append(self.now)
        every = self.resources.publish_every_updates
        if every is None or self.updates % every == 0:
            self.published.append(self.updates)
            self._transfer()

    # ---------------------------------------------------------------- new versions

    def _transfer(self) -> None:
        resources = self.resources
        if self.link_busy or not self.published:
            return
        skips = resources.publish_every_updates is None
        version = self.published.pop(-1 if skips else 0)
        if skips:
            self.published.clear()
        self.link_busy = resources.link_s > 0

        def transferred() -> None:
            self.link_busy = False
            self._transfer()

        def arrived() -> None:
            for replica in self.replicas:
                replica.target = version
                if not replica.busy:
                    self._load(replica)

        self.at(resources.link_s, transferred)
        self.at(max(resources.link_s, resources.sync_s), arrived)

    def _load(self, replica: Replica) -> None:
        if replica.target <= replica.version:
            return
        replica.version = replica.target
        if self.habits.recomputes:
            for task in replica.tasks:
                task.computed = 0
            replica.prompts = dict.fromkeys(replica.prompts, 0)
