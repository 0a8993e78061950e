"""The KV pool of one replica as tasks see it: who is in flight there, who may run, who must give way.

The task is the unit (continuous task batching). A turn runs only when its whole context and the probable part of what
it will say have room; until then its task waits here, its KV held for as long as that is worth its price, then paused.
New tasks are admitted only while the forecast of everybody's growth fits, and never before those that wait. Keeps I4: a
turn is let go only where what is charged afterwards is at most the budget; what turns say beyond that is charged when
they end, and no turn is let go until it has been made up for. Pure: time is an argument, nothing is awaited.

Nobody waits without bound. Let L be the longest that a turn runs: while turns run here, a task waits for room at most
`patience_s` + (n + 1)·L, n being those that came before it. For after its patience only older ones are let go before
it, one at least in each L: when all turns that run have ended, everything that is charged may leave.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from tiderl.data.errors import InvariantViolation
from tiderl.data.records import TaskKey
from tiderl.schedule.bookings import Bookings
from tiderl.schedule.charges import Charges
from tiderl.schedule.holding import Departure, Holding, HoldS
from tiderl.schedule.order import CANDIDATES, Ready
from tiderl.schedule.priority import STANDARD, Key, PriorityName, TaskFacts, Weights, priority
from tiderl.schedule.rates import EngineRates
from tiderl.schedule.residents import Facts, Kind, Resident
from tiderl.schedule.retention import Outcome, Price, leaves_by, memory_price

BATCHES = 2
"""Turns in an engine, in full batches, up to which more tasks are admitted: one runs, one is there to follow."""


class Verdict(NamedTuple):
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
        host_tokens: int = 0,
        growth_z: float = 1.0,
        patience_s: float = 30.0,
        rule: PriorityName = "tiers",
        weights: Weights = STANDARD,
    ) -> None:
        """`max_batch`: turns that run at a time, 0 for any number. `shares_prompts`: the engine keeps once what a group
        begins with. `reload_token_s`, `host_tokens`: of host memory, where there is some. `growth_z`: standard
        deviations of growth that admission leaves room for. `patience_s`: who waits longer for room goes before
        everybody, oldest first."""
        self.budget_tokens, self.max_batch = budget_tokens, max_batch
        self.kinds, self.rates = kinds, rates
        self.reload_token_s, self.host_tokens = reload_token_s, host_tokens
        self.rule, self.weights = rule, weights
        self.active = 0
        self.unbegun = 0
        """Tasks admitted before whose first turn could run."""
        self.late = 0
        """Of these, those whose environments begin so slowly that others take turns meanwhile."""
        self.waiting = 0
        """Tasks whose environment works."""
        self.open = True
        """Turns may run here: its process is up."""
        self._tasks: dict[TaskKey, Resident] = {}
        self._mean_tokens = 0.0
        self._charges = Charges(budget_tokens, block_tokens=block_tokens, shares_prompts=shares_prompts)
        self._bookings = Bookings(
            self._charges,
            kinds,
            rates,
            self.price,
            growth_z,
            max_turns=max_turns,
            max_context_tokens=max_context_tokens,
        )
        self._ready = Ready(self._rank, patience_s)
        self._holding = Holding(self._charges, self._rank)

    # ------------------------------------------------------------------ what the outside looks at

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def used_tokens(self) -> int:
        """Charged to tasks, each group's prompt once."""
        return self._charges.used_tokens

    @property
    def booked_tokens(self) -> float:
        """Contexts of all tasks in flight, those without KV included."""
        return self._bookings.tokens

    @property
    def pressed(self) -> bool:
        """Tasks wait for room."""
        return len(self._ready) > 0

    def price(self) -> Price:
        """Of this moment, with others queueing."""
        rates = self.rates
        token_second = memory_price(
            self._charges.running_tokens + self._mean_tokens, rates.elasticity(self.active, self.max_batch)
        )
        return Price(token_second, rates.compute_token_s, self.reload_token_s, self._mean_tokens)

    def expected_first_tokens(self, kind: str, group: Hashable) -> float | None:
        """Context of a first turn: the group's own where a member has begun, else its kind's; None: nothing known."""
        return self._bookings.expected_first_tokens(kind, group)

    def room_for(self, kind: str, tokens: float, now_s: float, tasks: int = 1, *, group: Hashable = None) -> bool:
        """Whether so many more tasks with first contexts of this size can be admitted, of a group that may be here.
        While others wait, only what fills a gap. Never when as many turns as `BATCHES` run are in the engine already:
        then more tasks would only wait there, with longer contexts. Always one where no turn runs or is about to."""
        late = self.begins_late(kind)
        if late and self._replaces(kind, tokens, tasks):
            return True
        soon = self.unbegun if late else self.unbegun - self.late
        if self.max_batch and self.active + soon >= BATCHES * self.max_batch:
            return False
        if self._ready:
            return tasks == 1 and not late and self._fills_a_gap(kind, math.ceil(tokens), now_s, group)
        if not self.active and not soon and tasks == 1:
            return True
        first, resident, tasks = math.ceil(tokens), self._resident(now_s), tasks + self.late * late
        return self._bookings.peak_tokens(kind, group, first, tasks, resident=resident) <= self.budget_tokens

    def begins_late(self, kind: str) -> bool:
        """Whether environments of this kind take longer to begin than a turn runs: what the pool holds at admission
        says little about the first turn."""
        known = self.kinds.get(kind)
        return known is not None and self.rates.known and known.resets.mean_s > self.rates.active_s

    def _replaces(self, kind: str, tokens: float, tasks: int) -> bool:
        """Whether so many more that begin late will only take the place of those that end meanwhile. In the long run
        tasks that have begun are to those that have not as the seconds that both take (Little, 1961): as many may be
        beginning as stand for what the pool and the engine can hold. Not while those that wait for room are more than
        are looked at for a place."""
        if len(self._ready) >= CANDIDATES:
            return False
        known, active_s = self.kinds[kind], self.rates.active_s
        turns = 1.0 + float(known.growth.tables().left_turns[0])
        turns_a_second = (self.late + tasks) * turns / known.resets.mean_s
        if self.max_batch and turns_a_second * active_s > BATCHES * self.max_batch:
            return False
        held_s = active_s + min(known.waits.mean_s, self._hold_s(self.price())(kind))
        held_tokens = self._charges.part_tokens(max(tokens, known.growth.context_tokens))
        return turns_a_second * held_s * held_tokens <= self.budget_tokens

    def _fills_a_gap(self, kind: str, tokens: int, now_s: float, group: Hashable) -> bool:
        """Whether one more may take at once what no task that waits can use; not while room is kept for one that waited
        beyond the patience. Its later turns will mostly wait: so only where KV comes back from host memory, which
        delays nobody else, while those that do not run are fewer than are looked at for a place, and while host memory
        will hold, on average, what the pool cannot: many that begin together are many that grow together."""
        if now_s >= self._ready.aged_s or len(self) - self.active >= CANDIDATES:
            return False
        if kind not in self.kinds or not self._loads_back:
            return False
        wanted = tokens + self.kinds[kind].growth.reserved_tokens(self.budget_tokens, cheap=True)
        if self._charges.missing_for(group, wanted) + self.unbegun * wanted > 0:
            return False
        peak_tokens = self._bookings.mean_peak_tokens(kind, group, tokens, 1, resident=self._resident(now_s))
        return peak_tokens <= self.budget_tokens + self.host_tokens

    @property
    def _loads_back(self) -> bool:
        """KV that leaves, of a turn that gives way too, comes back from host memory, which delays nobody else."""
        if self.reload_token_s is None or not self.rates.known:
            return False
        return leaves_by(self.rates.compute_token_s, self.reload_token_s) == "offload"

    def _resident(self, now_s: float) -> float:
        """The share of the tasks that hold KV, or would be worth it: all but those whose environments have worked for
        longer than it is. Whether it has gone earlier, for lack of room, does not count: that would make more room."""
        if not self.rates.known:
            return 1.0
        worth = self._holding.worth_holding(now_s, self._hold_s(self.price()))
        return 1.0 - (self.waiting - worth) / max(1, len(self) - self.late)

    def size_of(self, key: TaskKey) -> tuple[str, float]:
        """Kind and context of a task that has begun."""
        resident = self._tasks[key]
        return resident.kind, float(resident.context_tokens)

    def engine_priority(self, key: TaskKey, now_s: float) -> float:
        """One number for an engine's queue and evictions: while others wait for room the weighted sum, near the tiers
        with standard weights. Else only evaluation goes first, and tasks advance together: where a queue is there for
        lack of batch and not of memory, who overtakes leaves small batches to those at the end."""
        resident = self._tasks[key]
        facts = resident.facts(resident, now_s)
        if not self._ready:
            facts = TaskFacts(facts.evaluation)
        return priority(facts, "weighted", self.weights)[0]

    def impatient(self, now_s: float) -> list[TaskKey]:
        """Tasks that wait for room longer than it would take to compute their context elsewhere, oldest first."""
        if not self._ready:
            return []
        compute_token_s = self.rates.compute_token_s
        return [
            resident.key
            for resident in self._ready.oldest()
            if not self.open
            or not resident.charged_tokens
            or now_s - resident.ready_s > resident.context_tokens * compute_token_s
        ]

    def next_due_s(self, now_s: float) -> float | None:
        """When `pump` may find more room although nothing happened; None: never."""
        if not self._ready:
            return None
        due_s = self._holding.next_due_s(now_s, self._hold_s(self.price()))
        if self._ready.aged_s > now_s:
            due_s = min(due_s, self._ready.aged_s)
        return None if math.isinf(due_s) else due_s

    # ------------------------------------------------------------------ the life of a task

    def admit(self, key: TaskKey, kind: str, group: Hashable, tokens: float, facts: Facts, now_s: float) -> None:
        """A task is in flight here from now on; `tokens`: the expected context of its first turn."""
        resident = Resident(key, kind, group, facts, late=self.begins_late(kind), since_s=now_s)
        self._enter(resident, round(tokens))
        self.unbegun += 1
        self.late += resident.late

    def ask(
        self,
        key: TaskKey,
        context_tokens: int,
        max_new_tokens: int,
        now_s: float,
        *,
        first_ids: np.ndarray | None = None,
    ) -> Verdict:
        """The task's next turn, or the rest of one that was interrupted, could run now. If it is not among those that
        `go`, it waits. `first_ids`: of its first turn's context, int32 [context_tokens]. Raises `RequestTooLarge` for a
        turn that this pool can never hold."""
        resident = self._tasks[key]
        self._charges.refuse(resident, context_tokens + max_new_tokens)
        if resident.state not in ("admitted", "waiting"):
            raise InvariantViolation(f"{key} asks for a turn and is {resident.state}", where="task pool")
        if resident.state == "admitted":
            self._begins(resident)
        self._spent(now_s)
        self.waiting -= resident.state == "waiting"
        kind = self.kinds[resident.kind]
        if not resident.interrupted:
            if not resident.turns:
                resident.first_ids = first_ids
            kind.begins(resident, context_tokens, now_s)
            self._bookings.learn(resident)
        resident.context_tokens = context_tokens
        reserved_tokens = kind.growth.reserved_tokens(max_new_tokens, cheap=self._loads_back)
        resident.wanted_tokens = context_tokens + reserved_tokens
        resident.state, resident.ready_s = "ready", now_s
        self._bookings.rebook(resident, context_tokens)
        self._holding.wait_for_room(resident, now_s)
        self._ready.add(resident, now_s)
        return self.pump(now_s)

    def ended(
        self,
        key: TaskKey,
        context_tokens: int,
        new_tokens: int,
        now_s: float,
        *,
        interrupted: bool = False,
        cached_tokens: int | None = None,
    ) -> None:
        """Its turn ended, with `context_tokens` in all: it holds them while its environment works. `interrupted`: there
        is no such wait, it will ask for the rest of the turn. `cached_tokens`: what the engine had of the context when
        it began; None: it does not say."""
        resident = self._tasks[key]
        if resident.state != "active":
            raise InvariantViolation(f"a turn of {key} ended that did not run", where="task pool")
        self._spent(now_s)
        self.active -= 1
        self.waiting += 1
        resident.state = "waiting"
        resident.interrupted = interrupted
        self._charges.common.ends(resident, None if interrupted else cached_tokens)
        resident.said_tokens += new_tokens
        if not interrupted:
            resident.turns += 1
            self.kinds[resident.kind].growth.said(resident.said_tokens, context_tokens)
            resident.said_tokens = 0
        self._bookings.rebook(resident, context_tokens)
        self._charges.charge(resident, context_tokens)
        resident.begins_to_wait(context_tokens, now_s, self._holding.queued_s)
        self._holding.hold(resident)

    def leave(self, key: TaskKey, *, finished: bool) -> None:
        """The task is over here: it ended by itself (`finished`), failed, or goes elsewhere."""
        resident = self._tasks.pop(key)
        if finished and resident.turns:
            self.kinds[resident.kind].growth.ended(resident.turns)
        self._begins(resident)
        self._bookings.unbook(resident)
        self.active -= resident.state == "active"
        self.waiting -= resident.state == "waiting"
        self._ready.discard(resident)
        self._holding.release(resident)
        self._charges.common.ends(resident, None)
        self._charges.leave(resident)

    def _begins(self, resident: Resident) -> None:
        """It is not about to begin any more, if it was."""
        self.unbegun -= resident.state == "admitted"
        self.late -= resident.late
        resident.late = False

    def transfer(self, key: TaskKey, other: TaskPool, now_s: float) -> Verdict:
        """A task that waits for room goes to another replica, without its KV; the verdict is of that one."""
        resident = self._tasks[key]
        if resident.state != "ready":
            raise InvariantViolation(f"{key} is {resident.state} and does not wait for room", where="task pool")
        if resident.charged_tokens:
            resident.lets_go("drop", now_s, self._holding.queued_s)
        self.leave(key, finished=False)
        other._enter(resident, resident.context_tokens)
        other._ready.add(resident, now_s)
        return other.pump(now_s)

    def void(self) -> None:
        """All KV but that of running turns is worth nothing, offloaded or not: other weights, or the process is new.
        What was decided about it has no outcome."""
        self._charges.common.void()
        for resident in self._tasks.values():
            self._charges.common.computed(resident, False)
            if resident.state != "active":
                resident.price = None
                self._holding.drop(resident)

    def outcome(self, key: TaskKey, now_s: float) -> Outcome | None:
        """Of the wait that ends now, where memory had a price during it and nothing else decided."""
        return self._tasks[key].outcome(now_s, self._holding.queued_s)

    # ------------------------------------------------------------------ decisions

    def pump(self, now_s: float) -> Verdict:
        """Who of those that wait may run now: the first in order, and where it does not fit, those behind it that do,
        unless it has waited beyond the patience: then room is kept for it."""
        self._holding.look(now_s, queued=len(self._ready) > 0)
        go: list[TaskKey] = []
        departures: list[Departure] = []
        while self._ready and self.open:
            head, aged = self._ready.head(now_s)
            if self._make_room(head, now_s, departures, everything=aged or self.active == 0):
                self._start(head, go)
                continue
            used_tokens = self.used_tokens
            if not aged:
                for other in self._ready.behind(head, self._charges.fits):
                    self._start(other, go)
            if self.used_tokens >= used_tokens:
                break  # else a context has become shorter, and the head may fit now
        for key in go:  # now: whoever leaves has left before
            if not (resident := self._tasks[key]).turns and not resident.interrupted:
                self._charges.common.starts(resident)
        return Verdict(tuple(go), tuple(departures))

    def _start(self, resident: Resident, go: list[TaskKey]) -> None:
        self._ready.discard(resident)
        self._holding.release(resident)
        resident.state = "active"
        self.active += 1
        self._charges.charge(resident, resident.wanted_tokens, running=True)
        go.append(resident.key)

    def _make_room(self, resident: Resident, now_s: float, departures: list[Departure], *, everything: bool) -> bool:
        if self._charges.fits(resident):
            return True
        price = self.price()
        left = self._holding.make_room(resident, now_s, price, None if everything else self._hold_s(price))
        departures.extend(left)
        return bool(left)

    def _hold_s(self, price: Price) -> HoldS:
        """A wait for room is as long as it is: no histogram tells."""
        base, kinds = price.hold_s, self.kinds
        return lambda kind: base if kind is None else kinds[kind].waits.hold_s(base)

    def _rank(self, resident: Resident, now_s: float) -> Key:
        return priority(resident.facts(resident, now_s), self.rule, self.weights, now_s=now_s)

    def _spent(self, now_s: float) -> None:
        """A moment at which what runs and how large contexts are is looked at: at others nobody would ask who is due by
        the new price."""
        self.rates.spent(now_s, running=self.active)
        self._holding.look(now_s, queued=len(self._ready) > 0)
        begun = len(self._tasks) - self.late
        self._mean_tokens = self._bookings.own_tokens / begun if begun else 0.0

    def _enter(self, resident: Resident, tokens: int) -> None:
        if resident.key in self._tasks:
            raise InvariantViolation(f"{resident.key} is in flight already", where="task pool")
        self._tasks[resident.key] = resident
        self._charges.enter(resident)
        if resident.first_tokens:
            self._bookings.learn(resident)
        if not resident.late:
            self._bookings.book(resident, tokens)
