"""Slow, obviously right books of several task pools: every sum is made anew from the tasks, nothing is decided.

The oracle of `tests/unit/test_task_pool.py`: it follows the events and the verdicts, and tells what must hold then.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from tiderl.data.records import TaskKey
from tiderl.schedule.pool import TaskPool, Verdict
from tiderl.schedule.priority import Key

CANDIDATES = 8
"""Of those that wait, so many are tried when the first does not fit."""
AGREE = 4
"""What the last so many groups found tells what is common."""


class Fact(NamedTuple):
    """What a pool was told that tells something of what its groups have in common."""

    what: str
    """A first turn `starts`; a turn `ends`, or its task does; a `group` is over; all KV is `void`."""
    group: Hashable = None
    key: TaskKey | None = None
    cached: int | None = None
    others: bool = False
    """KV of other groups was there."""


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
    computed: bool = False
    """It holds what a turn has left."""


@dataclass
class SlowPools:
    """The tasks of some pools. Those that wait and came at the same moment are in the order in which they came."""

    pools: list[TaskPool]
    block: int
    shares: bool
    patience_s: float
    tasks: dict[TaskKey, SlowTask] = field(default_factory=dict)
    firsts: dict[tuple[int, Hashable], int] = field(default_factory=dict)
    commons: dict[tuple[int, Hashable], int] = field(default_factory=dict)
    """Of what a group begins with, what it has in common with others, as was known when it began."""
    facts: dict[int, list[Fact]] = field(default_factory=lambda: defaultdict(list))
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
        return sum(self.own(pool, t.group, t.held) for t in holders) + self.prompts(pool, holders)

    def prompts(self, pool: int, tasks: list[SlowTask]) -> int:
        """Of their groups: what each has for itself, and once for each kind whatever length is common."""
        groups = {t.group for t in tasks}
        alone = sum(self.shared(pool, group) - self.commons.get((pool, group), 0) for group in groups)
        return alone + sum(tokens for _, tokens in {(t.key.split, self.commons.get((pool, t.group), 0)) for t in tasks})

    def learned(self, pool: int, kind: str) -> int:
        """What groups of a kind have in common, from all that the pool was ever told."""
        facts, found = self.facts[pool], []
        for at, fact in enumerate(facts):
            before = [past for past in facts[:at] if past.group == fact.group and past.what in ("starts", "group")]
            opens = fact.what == "starts" and (not before or before[-1].what == "group")
            if opens and fact.others and fact.key is not None and fact.key.split == kind:
                found.append(self.finds(facts[at:]))
        last = sorted(told for told in found if told is not None)[-AGREE:]
        return min(tokens for _, tokens in last) if len(last) == AGREE else 0

    def finds(self, facts: list[Fact]) -> tuple[int, int] | None:
        """How many facts are left when all first turns have ended that started before one of them did, and the least
        that was there for them; None: not known."""
        group, started, ended = facts[0].group, set[TaskKey | None](), dict[TaskKey | None, int]()
        for at, fact in enumerate(facts):
            if fact.what == "starts" and fact.group == group and not ended:
                started.add(fact.key)
            elif fact.what == "void" or (fact.what == "ends" and fact.key in started - set(ended)):
                if fact.cached is None:
                    return None
                ended[fact.key] = fact.cached
                if ended.keys() == started:
                    return (at - len(facts), min(ended.values()))
        return None

    def begins(self, pool: int, task: SlowTask) -> None:
        """Its first context is known there."""
        if (pool, task.group) not in self.firsts:
            self.firsts[pool, task.group] = task.first
            known = self.learned(pool, task.key.split) // self.block * self.block
            self.commons[pool, task.group] = min(known, self.shared(pool, task.group))

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
            self.begins(task.pool, task)
        self.arrivals += 1
        task.state, task.context, task.wanted, task.ready_s = "ready", context, wanted, now_s
        task.arrival = self.arrivals

    def ended(self, task: SlowTask, context: int, *, interrupted: bool, cached: int | None) -> None:
        assert task.state == "active"
        self.facts[task.pool].append(Fact("ends", task.group, task.key, None if interrupted else cached))
        task.computed = True
        task.state, task.context, task.held, task.interrupted = "waiting", context, context, interrupted
        task.turns += not interrupted

    def left(self, task: SlowTask) -> None:
        del self.tasks[task.key]
        self.facts[task.pool].append(Fact("ends", task.group, task.key))
        if not any(t.group == task.group for t in self.of(task.pool)):
            self.firsts.pop((task.pool, task.group), None)
            self.commons.pop((task.pool, task.group), None)
            self.facts[task.pool].append(Fact("group", task.group))

    def moved(self, task: SlowTask, pool: int) -> None:
        self.left(task)
        task.pool, task.held, task.computed = pool, 0, False
        self.tasks[task.key] = task
        self.begins(pool, task)
        self.arrivals += 1
        task.arrival = self.arrivals

    def voided(self, pool: int) -> None:
        self.facts[pool].append(Fact("void"))
        for task in self.of(pool):
            task.computed = False
            if task.state != "active":
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
            task.held, task.computed = 0, False
        gave_back = {key for key in verdict.go if self.tasks[key].wanted < self.tasks[key].held}
        for key in verdict.go:
            task = self.tasks[key]
            assert task.pool == pool and task.state == "ready", f"{task} did not wait"
            task.state, task.held = "active", task.wanted
            if not task.turns and not task.interrupted:
                others = [t for t in self.of(pool) if t.computed and t.key.split == key.split and t.group != task.group]
                self.facts[pool].append(Fact("starts", task.group, key, others=bool(others)))
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
        assert real._charges.prompt_tokens == self.prompts(pool, self.of(pool)), "prompts in flight"
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
