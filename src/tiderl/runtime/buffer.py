"""Finished tasks to groups to batches: the books of every started group that is neither consumed nor dropped.

Keeps I1 (each trajectory ends once: the book says how), I3 (batches by `schedule.staleness`), I9 (members by number, a
group is ready only when all of its members are, all rewards finite). Knows no engine and no environment.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tiderl.data.errors import InvariantViolation
from tiderl.data.forks import Branch, branches
from tiderl.data.records import Prompt, Trajectory
from tiderl.data.records import Sequence as TrainSequence
from tiderl.data.settings import StalenessCounts
from tiderl.schedule.signals import ReadinessSignals
from tiderl.schedule.staleness import (
    GroupView,
    choose_batch,
    choose_more_of,
    choose_whole_batch,
    deadline,
    hall_violation_of,
)
from tiderl.schedule.strategy import Consumption


@dataclass
class Member:
    """One place of a group and the trajectory that fills it now."""

    number: int
    trajectory_id: int
    attempt: int = 0
    """Starts of this place so far, refills included; the next start of anything here has a higher one."""
    retries: int = 0
    trajectory: Trajectory | None = None
    sha256: str | None = None


@dataclass
class Group:
    prompt_id: int
    prompt: Prompt
    start_version: int
    deadline: int
    members: list[Member]
    refills: int = 0
    opened_on: int | None = None
    """The replica for whose sake it was opened; None: another run opened it."""
    ready_s: float | None = None
    ready_update: int = 0
    """Updates done when the group became ready: what `window` staleness counts from."""

    @property
    def ready(self) -> bool:
        return self.ready_s is not None

    def trajectories(self) -> list[Trajectory]:
        """By member number. Raises `InvariantViolation` when one is missing."""
        found = [member.trajectory for member in self.members]
        if any(trajectory is None for trajectory in found):
            raise InvariantViolation("an incomplete group was consumed", where=f"prompt {self.prompt_id}")
        return [trajectory for trajectory in found if trajectory is not None]

    def sequences(self) -> list[TrainSequence]:
        """What the trainer sees of the group, by member, and of a member by branch."""
        trajectories = self.trajectories()
        rewards = np.array([t.reward for t in trajectories], np.float64)
        if not np.isfinite(rewards).all():
            raise InvariantViolation("a non-finite reward reached a batch", where=f"prompt {self.prompt_id}")
        return [
            _sequence(self.prompt_id, trajectory, branch, rewards)
            for trajectory in trajectories
            for branch in branches(trajectory.forks, trajectory.tokens)
        ]


def _sequence(prompt_id: int, trajectory: Trajectory, branch: Branch, rewards: np.ndarray) -> TrainSequence:
    """One branch of a trajectory. What an earlier branch bears loss for is context here."""
    t, before = trajectory, branch.context_tokens
    loss_mask, logprobs, versions = branch.of(t.loss_mask), branch.of(t.logprobs), branch.of(t.versions)
    if before:
        loss_mask, logprobs, versions = loss_mask.copy(), logprobs.copy(), versions.copy()
        loss_mask[:before], logprobs[:before], versions[:before] = False, 0.0, -1
    return TrainSequence(
        trajectory_id=t.id,
        prompt_id=prompt_id,
        member=t.key.member,
        ids=branch.of(t.ids),
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        reward=t.reward,
        group_rewards=rewards,
    )


@dataclass
class Buffer:
    """All live groups by prompt id, and the counters of admission."""

    batch_groups: int
    max_staleness: int
    consumption: Consumption
    signals: ReadinessSignals
    counts: StalenessCounts = "oldest_token"
    taken: tuple[int, ...] = ()
    """Prompt ids of ready groups that the running update has taken, in order; still in the books until `consume`."""
    groups: dict[int, Group] = field(default_factory=dict)
    updates_done: int = 0
    started_groups: int = 0
    """Started and not dropped since the beginning of the run, consumed ones included."""
    next_prompt_id: int = 0
    next_trajectory_id: int = 0
    _due: Counter[int] = field(default_factory=Counter)
    """Groups in the books and not taken, by deadline."""
    _ready: list[tuple[float, ...]] = field(default_factory=list)
    """Of these the ready ones in consumption order; the last number is the prompt id."""

    def start(self, prompt: Prompt, start_version: int, group_size: int, replica: int) -> Group:
        """Opens the group of the next prompt, for the sake of a replica."""
        group = Group(
            prompt_id=self.next_prompt_id,
            prompt=prompt,
            start_version=start_version,
            deadline=deadline(start_version, self.max_staleness, self.counts),
            members=[Member(number, self.new_trajectory_id()) for number in range(group_size)],
            opened_on=replica,
        )
        self._enter(group)
        self.next_prompt_id += 1
        self.started_groups += 1
        self._check_bound()
        return group

    def _check_bound(self) -> None:
        if self.counts == "window":
            if len(self.groups) > (self.max_staleness + 1) * self.batch_groups:
                raise InvariantViolation(f"{len(self.groups)} groups are in flight or ready, more than the window (I3)")
            return
        violated = hall_violation_of(
            self._due, len(self.taken), self.updates_done, self.batch_groups, self.max_staleness
        )
        if violated is not None:
            raise InvariantViolation(f"more groups are due by update {violated + 1} than it can consume (I3)")

    def restore(self, group: Group, now_s: float) -> None:
        """Takes back a group that an earlier driver started; its counters come with `Recovered`."""
        if all(member.trajectory is not None for member in group.members):
            group.ready_s = now_s
        self._enter(group)

    def new_trajectory_id(self) -> int:
        number = self.next_trajectory_id
        self.next_trajectory_id += 1
        return number

    def fill(self, group: Group, member: Member, trajectory: Trajectory, sha256: str, now_s: float) -> bool:
        """A member finished. True when this makes its group ready."""
        if member.trajectory is not None:
            raise InvariantViolation("a member finished twice (I1)", where=f"trajectory {member.trajectory_id}")
        if not math.isfinite(trajectory.reward):
            raise InvariantViolation("a non-finite reward reached the buffer", where=f"trajectory {trajectory.id}")
        member.trajectory, member.sha256 = trajectory, sha256
        if any(m.trajectory is None for m in group.members):
            return False
        group.ready_s, group.ready_update = now_s, self.updates_done
        insort(self._ready, self._place(group))
        self.signals.observe(now_s, sum(t.trained_tokens for t in group.trajectories()))
        return True

    def drop(self, group: Group) -> None:
        """Forgets a group; its place in the staleness bound is free again."""
        del self.groups[group.prompt_id]
        if group.prompt_id not in self.taken:
            self._leave(group)
        self.started_groups -= 1

    def _enter(self, group: Group) -> None:
        self.groups[group.prompt_id] = group
        self._due[group.deadline] += 1
        if group.ready:
            insort(self._ready, self._place(group))

    def _leave(self, group: Group) -> None:
        """It is taken, consumed or dropped."""
        self._due[group.deadline] -= 1
        if not self._due[group.deadline]:
            del self._due[group.deadline]
        if group.ready:
            del self._ready[bisect_left(self._ready, self._place(group))]

    def _place(self, group: Group) -> tuple[float, ...]:
        """Where it stands in the order of consumption: by deadline, under `window` by the wait."""
        if self.counts == "window":
            return (group.ready_update, group.ready_s or 0.0, group.prompt_id)
        return (group.deadline, group.prompt_id)

    def views(self) -> list[GroupView]:
        return [GroupView(g.prompt_id, g.deadline, g.ready) for g in self.groups.values()]

    def choose(self) -> list[Group]:
        """The next whole batch in consumption order; none: wait. The groups stay in the books until `consume`."""
        chosen: Sequence[int] | None
        if len(self._ready) < self.batch_groups:
            return []
        if self.consumption == "whole_batch":
            chosen = choose_whole_batch(self.views(), self.batch_groups)
        elif self.counts == "window":
            chosen = [int(place[-1]) for place in self._ready[: self.batch_groups]]
        else:
            chosen = choose_batch(self.views(), self.updates_done, self.batch_groups, self.max_staleness)
        return [self.groups[prompt_id] for prompt_id in chosen or ()]

    def more(self) -> list[Group]:
        """What the running update may take now beside what it has taken, in consumption order; none: wait."""
        if self.counts == "window":
            free = self.batch_groups - len(self.taken)
            return [self.groups[int(place[-1])] for place in self._ready[:free]]
        first = [(int(due), int(prompt_id)) for due, prompt_id in self._ready[: self.batch_groups]]
        chosen = choose_more_of(
            first, self._due, len(self.taken), self.updates_done, self.batch_groups, self.max_staleness
        )
        return [self.groups[prompt_id] for prompt_id in chosen]

    def take(self, batch: Sequence[Group]) -> None:
        """These groups belong to the running update from now on."""
        for group in batch:
            self._leave(group)
        self.taken += tuple(group.prompt_id for group in batch)

    def consume(self, batch: Sequence[Group]) -> None:
        """The update over this batch is committed."""
        for group in batch:
            if group.prompt_id not in self.taken:
                self._leave(group)
            del self.groups[group.prompt_id]
        self.taken = ()
        self.updates_done += 1

    @property
    def ready_groups(self) -> list[Group]:
        return [g for g in self.groups.values() if g.ready]
