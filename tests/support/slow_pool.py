"""Slow, obviously right books of several task pools: every sum is made anew from the tasks, nothing is decided.

The oracle of `tests/unit/test_task_pool.py`: it follows the events and the verdicts, and tells what must hold then.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from tiderl.data.records import TaskKey
from tiderl.schedule.pool import TaskPool, Verdict
from tiderl.schedule.priority import Key

CANDIDATES = 8
"""Of those that wait, so many are tried when the first does not fit."""


@dataclass
class SlowTask:
    key: TaskKey
    group: Hashable
    rank: Key
    pool: int
    state: str = "admitted"
    first: int = 0
    context: int = 0
    wanted: int = 0
    held: int = 0  # positions, the group's prompt among them
    ready_s: float = 0.0
    arrival: int = 0
    turns: int = 0
    interrupted: bool = False


@dataclass
class SlowPools:
    """The tasks of some pools. Those that wait and came at the same moment are in the order in which they came."""

    pools: list[TaskPool]
    block: int
    shares: bool
    patience_s: float
    tasks: dict[TaskKey, SlowTask] = field(default_factory=dict)
    firsts: dict[tuple[int, Hashable], int] = field(default_factory=dict)
    arrivals: int = 0

    def of(self, pool: int, *states: str) -> list[SlowTask]:
        return [t for t in self.tasks.values() if t.pool == pool and (not states or t.state in states)]

    # ------------------------------------------------------------------ sums

    def shared(self, pool: int, group: Hashable) -> int:
        """What the engine keeps once of a group's first context."""
        first = self.firsts.get((pool, group), 0)
        return (first - 1) // self.block * self.block if first and self.shares else 0

    def own(self, pool: int, group: Hashable, positions: int) -> int:
        """In whole blocks, at least one."""
        return math.ceil(max(1, positions - self.shared(pool, group)) / self.block) * self.block

    def held(self, pool: int, holders: list[SlowTask]) -> int:
        """By these: their own parts, and the prompt of each of their groups."""
        own = sum(self.own(pool, t.group, t.held) for t in holders)
        return own + sum(self.shared(pool, group) for group in {t.group for t in holders})

    def used(self, pool: int) -> int:
        return self.held(pool, [t for t in self.of(pool) if t.held])

    def fits(self, task: SlowTask, *, beside: str = "everybody") -> bool:
        """Whether its turn has room beside what others hold, `everybody` or those that are `running`."""
        others = self.of(task.pool) if beside == "everybody" else self.of(task.pool, "active")
        before, task.held = task.held, task.wanted
        needed = self.held(task.pool, [task, *(t for t in others if t.held and t is not task)])
        task.held = before
        return needed <= self.pools[task.pool].budget_tokens

    # ------------------------------------------------------------------ events

    def asked(self, task: SlowTask, context: int, wanted: int, now_s: float) -> None:
        if task.state == "admitted":
            task.first = context
            self.firsts.setdefault((task.pool, task.group), context)
        self.arrivals += 1
        task.state, task.context, task.wanted, task.ready_s = "ready", context, wanted, now_s
        task.arrival = self.arrivals

    def ended(self, task: SlowTask, context: int, *, interrupted: bool) -> None:
        assert task.state == "active"
        task.state, task.context, task.held, task.interrupted = "waiting", context, context, interrupted
        task.turns += not interrupted

    def left(self, task: SlowTask) -> None:
        del self.tasks[task.key]
        if not any(t.group == task.group for t in self.of(task.pool)):
            self.firsts.pop((task.pool, task.group), None)

    def moved(self, task: SlowTask, pool: int) -> None:
        self.left(task)
        task.pool, task.held = pool, 0
        self.tasks[task.key] = task
        self.firsts.setdefault((pool, task.group), task.first)
        self.arrivals += 1
        task.arrival = self.arrivals

    def voided(self, pool: int) -> None:
        for task in self.of(pool, "admitted", "waiting", "ready"):
            task.held = 0

    # ------------------------------------------------------------------ verdicts

    def decided(self, pool: int, verdict: Verdict, now_s: float) -> None:
        """Follows a verdict, and checks it."""
        budget, waited = self.pools[pool].budget_tokens, {t.key: t.ready_s for t in self.of(pool, "ready")}
        for departure in verdict.departures:
            task = self.tasks[departure.key]
            assert task.pool == pool and task.state in ("waiting", "ready"), f"{task} runs, and its KV leaves"
            assert task.held, f"{task} holds nothing that could leave"
            assert departure.ready == (task.state == "ready")
            task.held = 0
        gave_back = {key for key in verdict.go if self.tasks[key].wanted < self.tasks[key].held}
        for key in verdict.go:
            task = self.tasks[key]
            assert task.pool == pool and task.state == "ready", f"{task} did not wait"
            task.state, task.held = "active", task.wanted
        assert len(set(verdict.go)) == len(verdict.go)
        if verdict.go:
            assert self.pools[pool].open
            assert self.used(pool) <= budget, "I4: a turn was let go past the budget"
        if not gave_back:  # their contexts are shorter: who comes before them may fit after them
            self._in_order([self.tasks[key] for key in verdict.go], waited, now_s)

    def _in_order(self, went: list[SlowTask], waited: dict[TaskKey, float], now_s: float) -> None:
        aged = [key for key, since_s in waited.items() if now_s >= since_s + self.patience_s]
        old = [task for task in went if task.key in aged]
        assert went[: len(old)] == old, "somebody younger went before one that has waited beyond the patience"
        assert [t.ready_s for t in old] == sorted(t.ready_s for t in old), "the oldest goes first"
        young = [task.rank for task in went[len(old) :]]
        assert young == sorted(young, reverse=True), "priority is not respected"
        left = [self.tasks[key] for key in aged if self.tasks[key].state == "ready"]
        if left:
            assert len(old) == len(went), "somebody overtook one that has waited beyond the patience"
            assert all(t.ready_s <= min(o.ready_s for o in left) for t in old)

    def settled(self, pool: int, now_s: float) -> None:
        """What holds after every pump."""
        real, ready = self.pools[pool], self.of(pool, "ready")
        assert real.used_tokens == self.used(pool), f"{real.used_tokens} tokens are charged, not {self.used(pool)}"
        counts = (len(real), real.active, real.waiting, real.unbegun)
        states = [self.of(pool), *(self.of(pool, state) for state in ("active", "waiting", "admitted"))]
        assert counts == tuple(map(len, states)), f"{counts} tasks are counted"
        if not ready or not real.open:
            return
        assert self.of(pool, "active"), "the engine is idle, and tasks wait for room"
        order = sorted(ready, key=lambda t: (tuple(-part for part in t.rank), t.arrival))
        oldest = min(t.ready_s for t in ready)
        if now_s < oldest + self.patience_s:
            for task in order[: CANDIDATES + 1]:
                assert not self.fits(task), f"{task} waits, and fits"
        else:
            first = min(ready, key=lambda t: (t.ready_s, t.arrival))
            assert not self.fits(first, beside="running"), f"{first} waits beyond the patience, and could have room"
