"""The KV pool of one replica as tasks see it: who is in flight there, who holds what, who may run, who must give way.

The task is the unit (continuous task batching). A turn runs only when its whole context and the probable part of what
it will say have room; until then its task waits here, its KV held for as long as that is worth its price, then paused.
New tasks are admitted only while the forecast of everybody's growth fits, and never before those that wait. Keeps I4:
what is charged is at most the budget, and is given back exactly once. Pure: time is an argument, nothing is awaited.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tiderl.data.errors import InvariantViolation
from tiderl.data.records import TaskKey
from tiderl.schedule.forecast import Population, Share, forecast, peak
from tiderl.schedule.growth import TaskGrowth
from tiderl.schedule.priority import STANDARD, Key, PriorityName, TaskFacts, Weights, priority
from tiderl.schedule.rates import EngineRates
from tiderl.schedule.retention import Choice, Outcome, Price, Waits, memory_price

State = Literal["admitted", "active", "waiting", "ready"]
"""Not begun; its turn runs; its environment works; its turn is to run and has no room."""

OVERTAKERS = 8
"""Tasks behind the first waiting one that are tried when they fit and it does not."""

FULL = 0.01
"""Elasticity of an engine whose batch is full: not quite nothing, since turns end."""

SOON = 2
"""Steps of the forecast that count where pausing is cheap: now, and the next."""

SHARE_REFRESH = 64
"""Turns after which the resident share of a kind is measured again."""


@dataclass
class Kind:
    """What is known of tasks that behave alike: those of one environment, training and evaluation apart."""

    growth: TaskGrowth
    waits: Waits = field(default_factory=Waits)


@dataclass(eq=False)
class Resident:
    """One task in flight on the replica."""

    key: TaskKey
    kind: str
    group: Hashable
    facts: Callable[[Resident, float], TaskFacts]
    """What its priority rests on now."""
    tokens: int
    """Its context as far as it is known, an estimate before its first turn."""
    turns: int = 0
    state: State = "admitted"
    charged_tokens: int = 0
    """What it has of the pool, the group's prompt not counted; 0: it holds nothing."""
    booked_step: int = 0
    since_s: float = 0.0
    """When its last turn ended: since then it holds what it holds."""
    ready_s: float = 0.0
    """Since when its next turn could run."""
    wanted_tokens: int = 0
    """Positions that its turn needs, while it is ready."""
    context_tokens: int = 0
    first_tokens: int = 0
    """Context of its first turn."""
    left: Choice | None = None
    """How its KV went, when it went during this wait."""
    held_s: float = 0.0
    price: Price | None = None
    counted: bool = False
    """It has a part in its group's prompt."""


Facts = Callable[[Resident, float], TaskFacts]


@dataclass(frozen=True)
class Departure:
    """A task's KV that has to leave the replica now."""

    key: TaskKey
    choice: Choice
    tokens: int
    ready: bool
    """It was to run: it is paused."""
    price: Price


@dataclass(frozen=True)
class Verdict:
    """What follows from an event: whose turn may run now, in order, and whose KV leaves before."""

    go: tuple[TaskKey, ...] = ()
    departures: tuple[Departure, ...] = ()


class TaskPool:
    """One replica. `kinds` and what they know may be shared by all replicas."""

    def __init__(
        self,
        budget_tokens: int,
        kinds: dict[str, Kind],
        rates: EngineRates,
        *,
        max_turns: int,
        max_context_tokens: int,
        block_tokens: int = 1,
        max_batch: int = 0,
        shares_prompts: bool = False,
        reload_token_s: float | None = None,
        growth_z: float = 1.0,
        patience_s: float = 30.0,
        rule: PriorityName = "tiers",
        weights: Weights = STANDARD,
    ) -> None:
        """`max_batch`: turns that run at a time, 0 for any number. `shares_prompts`: the engine keeps what a group begins with once. `growth_z`: standard deviations of growth
        that admission leaves room for. `patience_s`: who waits longer for room goes before everybody, oldest first."""
        self.budget_tokens, self.block_tokens, self.shares_prompts = budget_tokens, block_tokens, shares_prompts
        self.max_batch = max_batch
        self.kinds, self.rates = kinds, rates
        self.max_turns, self.max_context_tokens = max_turns, max_context_tokens
        self.reload_token_s, self.growth_z, self.patience_s = reload_token_s, growth_z, patience_s
        self.rule, self.weights = rule, weights
        self.used_tokens = 0
        self.active = 0
        self.unbegun = 0
        """Tasks admitted before whose first turn could run."""
        self.waiting = 0
        self.open = True
        """Turns may run here: its process is up."""
        self._tasks: dict[TaskKey, Resident] = {}
        self._populations: dict[str, Population] = {}
        self._shares: dict[str, tuple[int, float]] = {}
        self._turns_seen = 0
        self._prompts: dict[Hashable, list[int]] = {}  # group -> [prompt tokens kept once, holders, in flight]
        self._prompt_tokens = 0  # of all groups in flight
        self._ready: dict[TaskKey, Resident] = {}  # oldest first
        self._ready_heap: list[tuple[tuple[float, ...], int, Resident]] = []
        self._held: dict[str, dict[TaskKey, Resident]] = {}  # by kind, oldest wait first: not due yet
        self._held_ready: dict[TaskKey, Resident] = {}  # as these, of tasks that wait for room, oldest first
        self._due: list[tuple[tuple[float, ...], int, Resident]] = []  # heap: lowest priority first
        self._due_tokens = 0
        self._due_set: dict[TaskKey, None] = {}
        self._stamp = 0

    # ------------------------------------------------------------------ what the outside looks at

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def ready(self) -> int:
        """Tasks that wait for room."""
        return len(self._ready)

    @property
    def booked_tokens(self) -> float:
        """Contexts of all tasks in flight, those without KV included."""
        return sum(population.tokens for population in self._populations.values()) + self._prompt_tokens

    def price(self) -> Price:
        """Of this moment, with others queueing."""
        elasticity = self.rates.elasticity(self.active)
        if self.max_batch and self.active > self.max_batch:
            elasticity = min(elasticity, FULL)  # some of them do not even run
        return Price(memory_price(self.budget_tokens, elasticity), self.rates.compute_token_s, self.reload_token_s)

    def expected_first_tokens(self, kind: str, group: Hashable) -> float | None:
        """Context of a first turn: the group's own where a member has begun, else its kind's; None: nothing known."""
        known = self._prompts.get(group)
        if known is not None and known[3]:
            return float(known[3])
        growth = self.kinds[kind].growth if kind in self.kinds else None
        return None if growth is None else growth.first_tokens(self.growth_z)

    def room_for(self, kind: str, tokens: float, tasks: int = 1) -> bool:
        """Whether so many more tasks with first contexts of this size can be admitted. Never while others wait, or when the
        engine's batch is full: then more tasks would only wait there, with longer contexts."""
        if self._ready or (self.max_batch and self.active + self.unbegun >= self.max_batch):
            return False
        if not self._tasks:
            return True
        kinds = list(self._populations)
        if kind not in self._populations:
            kinds.append(kind)
        shares = [self._share(name) for name in kinds]
        extra = np.zeros((len(kinds), 3))
        extra[kinds.index(kind)] = (tasks, tasks * tokens, tasks * tokens * tokens)
        mean, variance = forecast(shares, extra)
        if self.price().hold_s < self.rates.active_s:
            # Bringing KV back costs less than leaving room idle for a turn: what comes later can be paused then.
            mean, variance = mean[:SOON], variance[:SOON]
        return peak(mean, variance, self.growth_z) + self._prompt_tokens <= self.budget_tokens

    def size_of(self, key: TaskKey) -> tuple[str, float]:
        """Kind and context of a task in flight."""
        resident = self._tasks[key]
        return resident.kind, float(resident.context_tokens or resident.tokens)

    def engine_priority(self, key: TaskKey, now_s: float) -> float:
        """One number for an engine's own queue and evictions: the published tiers, each worth more than those below."""
        resident = self._tasks[key]
        return priority(resident.facts(resident, now_s), "weighted")[0]

    def impatient(self, now_s: float) -> list[TaskKey]:
        """Tasks that wait for room longer than it would take to compute their context elsewhere, oldest first."""
        if not self._ready:
            return []
        compute_token_s = self.rates.compute_token_s
        return [
            resident.key
            for resident in itertools.islice(self._ready.values(), OVERTAKERS)
            if not self.open
            or not resident.charged_tokens
            or now_s - resident.ready_s > resident.context_tokens * compute_token_s
        ]

    # ------------------------------------------------------------------ the life of a task

    def admit(self, key: TaskKey, kind: str, group: Hashable, tokens: float, facts: Facts) -> None:
        """A task is in flight here from now on; `tokens`: the expected context of its first turn."""
        if key in self._tasks:
            raise InvariantViolation(f"{key} is in flight already", where="task pool")
        resident = Resident(key, kind, group, facts, round(tokens))
        self.unbegun += 1
        self._enter(resident)

    def transfer(self, key: TaskKey, other: TaskPool, now_s: float) -> Verdict:
        """A task that waits for room goes to another replica, without its KV; the verdict is of that one."""
        resident = self._tasks[key]
        self.leave(key, finished=False)
        other._enter(resident)
        other._learn_prompt(resident.group, resident.first_tokens)
        other._wait_for_room(resident, now_s)
        return other.pump(now_s)

    def ask(self, key: TaskKey, context_tokens: int, max_new_tokens: int, now_s: float) -> Verdict:
        """The task's next turn could run now. If it is not among those that `go`, it waits."""
        resident = self._tasks[key]
        kind = self.kinds[resident.kind]
        if resident.turns == 0 and resident.state == "admitted":
            self.unbegun -= 1
            kind.growth.started(context_tokens)
            resident.first_tokens = context_tokens
            self._learn_prompt(resident.group, context_tokens)
        elif resident.state == "waiting":
            kind.growth.went_on(resident.turns, context_tokens - resident.context_tokens)
            kind.waits.observe(now_s - resident.since_s)
            self.waiting -= 1
        self._rebook(resident, self._own(resident.group, context_tokens))
        resident.context_tokens = context_tokens
        resident.wanted_tokens = context_tokens + kind.growth.reserved_tokens(max_new_tokens)
        self._wait_for_room(resident, now_s)
        return self.pump(now_s)

    def ended(self, key: TaskKey, context_tokens: int, new_tokens: int, now_s: float) -> None:
        """Its turn ended, with `context_tokens` in all: it holds them while its environment works."""
        resident = self._tasks[key]
        if resident.state != "active":
            raise InvariantViolation(f"a turn of {key} ended that did not run", where="task pool")
        self.active -= 1
        self.waiting += 1
        resident.state = "waiting"
        resident.turns += 1
        self.kinds[resident.kind].growth.said(new_tokens)
        self._turns_seen += 1
        own = self._own(resident.group, context_tokens)
        self._rebook(resident, own)
        resident.context_tokens = context_tokens
        self._charge(resident, self._blocks(own))
        resident.since_s, resident.left, resident.held_s, resident.price = now_s, None, 0.0, None
        self._held.setdefault(resident.kind, {})[key] = resident

    def leave(self, key: TaskKey, *, finished: bool) -> None:
        """The task is over here: it ended by itself (`finished`), failed, or goes elsewhere."""
        resident = self._tasks.pop(key)
        if finished and resident.turns:
            self.kinds[resident.kind].growth.ended(resident.turns)
        self._population(resident.kind).remove(resident.booked_step, resident.tokens)
        self.active -= resident.state == "active"
        self.unbegun -= resident.state == "admitted"
        self.waiting -= resident.state == "waiting"
        self._unwait(resident)
        self._charge(resident, 0)
        prompt = self._prompts[resident.group]
        prompt[2] -= 1
        if prompt[2] == 0:
            self._prompt_tokens -= prompt[0]
            del self._prompts[resident.group]

    def void(self, now_s: float) -> None:
        """All KV but that of running turns is worth nothing: other weights, or the process is new."""
        for resident in self._tasks.values():
            if resident.state != "active" and resident.charged_tokens:
                self._unhold(resident)
                self._charge(resident, 0)
                resident.held_s = now_s - resident.since_s

    def outcome(self, key: TaskKey, now_s: float) -> Outcome | None:
        """Of the wait that ends now, where memory had a price during it."""
        resident = self._tasks[key]
        if resident.price is None:
            return None
        waited_s = now_s - resident.since_s
        held_s = waited_s if resident.left is None else resident.held_s
        return Outcome(resident.left or "keep", resident.context_tokens, waited_s, held_s, resident.price)

    # ------------------------------------------------------------------ decisions

    def pump(self, now_s: float) -> Verdict:
        """Who of those that wait may run now. The first in order; where it does not fit, a few behind it that do,
        unless it has waited beyond the patience: then room is kept for it."""
        go: list[TaskKey] = []
        departures: list[Departure] = []
        while self._ready and self.open:
            head, aged = self._head(now_s)
            stuck = self.active == 0 and self.waiting == 0
            if self._make_room(head, now_s, departures, whole=aged or stuck):
                self._start(head)
                go.append(head.key)
                continue
            if not aged:
                for other in self._overtakers(head):
                    if self._missing(other) <= 0:
                        self._start(other)
                        go.append(other.key)
            break
        return Verdict(tuple(go), tuple(departures))

    def next_due_s(self, now_s: float) -> float | None:
        """When `pump` may find more room although nothing happened; None: never."""
        if not self._ready:
            return None
        price = self.price()
        moments = [next(iter(self._ready.values())).ready_s + self.patience_s]
        if self._held_ready:
            moments.append(next(iter(self._held_ready.values())).ready_s + price.hold_s)
        for kind, held in self._held.items():
            if held:
                moments.append(next(iter(held.values())).since_s + self.kinds[kind].waits.hold_s(price))
        later = [moment for moment in moments if moment > now_s and not math.isinf(moment)]
        return min(later) if later else None

    def _rank(self, resident: Resident, now_s: float) -> Key:
        return priority(resident.facts(resident, now_s), self.rule, self.weights, now_s=now_s)

    # ------------------------------------------------------------------ inside: waiting

    def _wait_for_room(self, resident: Resident, now_s: float) -> None:
        if resident.state != "ready":
            resident.state, resident.ready_s = "ready", now_s
        self._ready[resident.key] = resident
        if self._held.get(resident.kind, {}).pop(resident.key, None) is not None:
            self._held_ready[resident.key] = resident
        self._stamp += 1
        heapq.heappush(self._ready_heap, (_negated(self._rank(resident, now_s)), self._stamp, resident))

    def _head(self, now_s: float) -> tuple[Resident, bool]:
        oldest = next(iter(self._ready.values()))
        if now_s >= oldest.ready_s + self.patience_s:  # as `next_due_s` says: the difference may round below it
            return oldest, True
        while True:
            key, stamp, resident = self._ready_heap[0]
            if self._ready.get(resident.key) is not resident:
                heapq.heappop(self._ready_heap)
                continue
            now = _negated(self._rank(resident, now_s))
            if now > key:
                heapq.heapreplace(self._ready_heap, (now, stamp, resident))
                continue
            return resident, False

    def _overtakers(self, head: Resident) -> list[Resident]:
        entries = heapq.nsmallest(OVERTAKERS + 1, self._ready_heap)
        found = dict.fromkeys(
            entry[2] for entry in entries if entry[2] is not head and self._ready.get(entry[2].key) is entry[2]
        )
        return list(found)

    def _start(self, resident: Resident) -> None:
        self._unwait(resident)
        resident.state = "active"
        self.active += 1
        self._charge(resident, self._blocks(self._own(resident.group, resident.wanted_tokens)))

    def _unwait(self, resident: Resident) -> None:
        self._ready.pop(resident.key, None)
        if not self._ready:
            self._ready_heap.clear()
        self._unhold(resident)

    # ------------------------------------------------------------------ inside: room

    def _missing(self, resident: Resident) -> int:
        """Tokens that the pool lacks for its turn."""
        own = self._blocks(self._own(resident.group, resident.wanted_tokens))
        prompt = self._prompts[resident.group]
        shared = 0 if resident.counted or prompt[1] else prompt[0]
        return self.used_tokens + own - resident.charged_tokens + shared - self.budget_tokens

    def _make_room(self, resident: Resident, now_s: float, departures: list[Departure], *, whole: bool) -> bool:
        """Room for its turn, taken from those that wait where that is worth its price; `whole`: from all of them."""
        missing = self._missing(resident)
        if missing <= 0:
            return True
        price = self.price()
        self._find_due(now_s, price, whole=whole)
        mine = resident.charged_tokens if resident.key in self._due_set else 0
        if self._due_tokens - mine < missing and (not whole or self._due_room(resident) < missing):
            return False
        kept: list[tuple[tuple[float, ...], int, Resident]] = []
        while missing > 0 and self._due:
            entry = heapq.heappop(self._due)
            victim = entry[2]
            if victim.key not in self._due_set or self._tasks.get(victim.key) is not victim:
                continue
            if victim is resident:
                kept.append(entry)
                continue
            departures.append(Departure(victim.key, price.leave, victim.context_tokens, victim.state == "ready", price))
            victim.left, victim.held_s, victim.price = price.leave, now_s - victim.since_s, price
            self._unhold(victim)
            self._charge(victim, 0)
            missing = self._missing(resident)
        for entry in kept:
            heapq.heappush(self._due, entry)
        return missing <= 0

    def _due_room(self, resident: Resident) -> int:
        """Tokens that come free when all that are due leave but `resident`: with its last holder a group's prompt."""
        leaving = [self._tasks[key] for key in self._due_set if key != resident.key]
        holders = Counter(other.group for other in leaving if other.counted)
        prompts = sum(self._prompts[group][0] for group, count in holders.items() if count == self._prompts[group][1])
        return sum(other.charged_tokens for other in leaving) + prompts

    def _find_due(self, now_s: float, price: Price, *, whole: bool) -> None:
        """Those whose KV is not worth holding any longer, oldest waits first; `whole`: everybody that waits."""
        for kind, held in self._held.items():
            hold_s = 0.0 if whole else self.kinds[kind].waits.hold_s(price)
            while held:
                resident = next(iter(held.values()))
                if now_s < resident.since_s + hold_s:
                    break
                del held[resident.key]
                self._let_go(resident, now_s, price)
        while self._held_ready:  # how long the wait for room takes, no histogram tells
            resident = next(iter(self._held_ready.values()))
            if not whole and now_s - resident.ready_s < price.hold_s:
                break
            del self._held_ready[resident.key]
            self._let_go(resident, now_s, price)

    def _let_go(self, resident: Resident, now_s: float, price: Price) -> None:
        """From now on its KV may make room for others."""
        resident.price = price
        self._due_set[resident.key] = None
        self._due_tokens += resident.charged_tokens
        self._stamp += 1
        heapq.heappush(self._due, (self._rank(resident, now_s), self._stamp, resident))

    def _unhold(self, resident: Resident) -> None:
        """It is not among those that may have to give way any more."""
        if resident.key in self._due_set:
            del self._due_set[resident.key]
            self._due_tokens -= resident.charged_tokens
            if not self._due_set:
                self._due.clear()
        elif self._held_ready.pop(resident.key, None) is None:
            self._held.get(resident.kind, {}).pop(resident.key, None)

    # ------------------------------------------------------------------ inside: books

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens) * self.block_tokens

    def _own(self, group: Hashable, tokens: int) -> int:
        """Of so many positions, those that are not the group's prompt."""
        return tokens - self._prompts[group][0]

    def _learn_prompt(self, group: Hashable, tokens: int) -> None:
        prompt = self._prompts[group]
        if prompt[3]:
            return
        prompt[3] = tokens
        if self.shares_prompts:
            prompt[0] = (tokens - 1) // self.block_tokens * self.block_tokens
            self._prompt_tokens += prompt[0]

    def _charge(self, resident: Resident, tokens: int) -> None:
        """The only place where the pool is charged and credited. 0: it holds nothing."""
        self.used_tokens += tokens - resident.charged_tokens
        resident.charged_tokens = tokens
        prompt = self._prompts[resident.group]
        if bool(tokens) != resident.counted:
            resident.counted = bool(tokens)
            prompt[1] += 1 if tokens else -1
            if prompt[1] == (1 if tokens else 0):
                self.used_tokens += prompt[0] if tokens else -prompt[0]
        if self.used_tokens < 0:
            raise InvariantViolation(f"{self.used_tokens} tokens used", where="task pool, I4")

    def _enter(self, resident: Resident) -> None:
        self._tasks[resident.key] = resident
        self._prompts.setdefault(resident.group, [0, 0, 0, 0])[2] += 1
        population = self._population(resident.kind)
        resident.booked_step = self.kinds[resident.kind].growth.step_of(resident.turns)
        population.add(resident.booked_step, resident.tokens)

    def _rebook(self, resident: Resident, own_tokens: int) -> None:
        population = self._population(resident.kind)
        population.remove(resident.booked_step, resident.tokens)
        resident.booked_step = self.kinds[resident.kind].growth.step_of(resident.turns)
        resident.tokens = own_tokens
        population.add(resident.booked_step, own_tokens)

    def _population(self, kind: str) -> Population:
        population = self._populations.get(kind)
        if population is None:
            if kind not in self.kinds:
                self.kinds[kind] = Kind(TaskGrowth(self.max_turns, self.max_context_tokens))
            population = self._populations[kind] = Population(self.kinds[kind].growth.steps)
        return population

    def _share(self, kind: str) -> Share:
        population = self._population(kind)
        known = self._shares.get(kind)
        if known is None or self._turns_seen - known[0] >= SHARE_REFRESH:
            waits = self.kinds[kind].waits
            resident = waits.held_share(waits.hold_s(self.price()), self.rates.active_s) if self.rates.known else 1.0
            known = self._shares[kind] = (self._turns_seen, resident)
        return Share(population, self.kinds[kind].growth.tables(), known[1])


def _negated(key: Key) -> tuple[float, ...]:
    return tuple(-part for part in key)
