"""Whose KV may leave a replica's pool: it is held while its task waits, for as long as that is worth its price.

Then it is due: it stays until somebody needs the room, and the lowest priority leaves first. Books only: `retention`
says what holding is worth, `pool` who needs room.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import NamedTuple

from tiderl.data.errors import InvariantViolation
from tiderl.data.records import TaskKey
from tiderl.schedule.charges import Charges
from tiderl.schedule.order import Rank, Ranked
from tiderl.schedule.residents import Resident
from tiderl.schedule.retention import Choice, Price

HoldS = Callable[[str | None], float]
"""For how long KV is held: while a task of this kind waits for its environment, None: while one waits for room."""


class Departure(NamedTuple):
    """A task's KV that has to leave the replica now."""

    key: TaskKey
    choice: Choice
    """`offload` or `drop`."""
    tokens: int
    ready: bool
    """Its task was to run."""


class Holding:
    """KV of the tasks that do not run, on one replica."""

    def __init__(self, charges: Charges, rank: Rank) -> None:
        self._charges = charges
        # By kind, oldest wait first: not due yet; and as these, whether it has gone meanwhile or not.
        self._held: defaultdict[str, OrderedDict[TaskKey, Resident]] = defaultdict(OrderedDict)
        self._worth: defaultdict[str, OrderedDict[TaskKey, Resident]] = defaultdict(OrderedDict)
        self._ready: OrderedDict[TaskKey, Resident] = OrderedDict()  # as these, of tasks that wait for room
        self._due = Ranked(rank, lowest=True)
        self.queued_s = 0.0
        """For how long anybody has waited for room, up to the last look at the clock."""
        self._looked_s = 0.0

    def look(self, now_s: float, *, queued: bool) -> None:
        """It is this late; `queued`: since the last look somebody waited for room."""
        self.queued_s += (now_s - self._looked_s) * queued
        self._looked_s = now_s

    def hold(self, resident: Resident) -> None:
        """It waits since its `since_s`, later than everybody here."""
        self._held[resident.kind][resident.key] = resident
        self._worth[resident.kind][resident.key] = resident

    def wait_for_room(self, resident: Resident, now_s: float) -> None:
        """Its next turn could run, since its `ready_s`: it is held for that long anew, and its priority has changed."""
        self._forget(resident)
        if resident in self._due:
            self._due.add(resident, now_s)
        elif self._held[resident.kind].pop(resident.key, None) is not None:
            self._ready[resident.key] = resident

    def release(self, resident: Resident) -> None:
        """It is to run, or over: its KV is not among these any more, and still charged."""
        self._forget(resident)
        self._take_out(resident)

    def _take_out(self, resident: Resident) -> None:
        if resident in self._due:
            self._due.discard(resident)
            self._charges.due(resident, False)
        elif self._ready.pop(resident.key, None) is None:
            self._held[resident.kind].pop(resident.key, None)

    def drop(self, resident: Resident) -> None:
        """Its KV is gone."""
        self._charges.charge(resident, 0)
        self._take_out(resident)

    def make_room(self, resident: Resident, now_s: float, price: Price, hold_s: HoldS | None) -> list[Departure]:
        """Whose KV leaves so that the task's next turn, which has no room, gets some: nobody's if that is not enough.

        `hold_s`: only what has been held for longer may leave; None: everything that does not run.
        """
        self._find_due(now_s, price, hold_s)
        missing = self._charges.missing(resident, resident.wanted_tokens)
        # Mostly their own parts are enough, without the prompts that would go with them.
        mine_tokens = resident.charged_tokens if resident.charged_due else 0
        if self._charges.due_tokens - mine_tokens < missing and (
            self._charges.missing(resident, resident.wanted_tokens, without_due=True) > 0
        ):
            return []
        departures = []
        while missing > 0:
            victim = self._due.first(now_s, but=resident)
            if victim is None:
                raise InvariantViolation(f"{missing} tokens are missing, and nobody is left", where="task pool, I4")
            departures.append(Departure(victim.key, price.leave, victim.held_tokens, victim.state == "ready"))
            victim.price = price
            victim.lets_go(price.leave, now_s, self.queued_s)
            self.drop(victim)
            missing = self._charges.missing(resident, resident.wanted_tokens)
        return departures

    def worth_holding(self, now_s: float, hold_s: HoldS) -> int:
        """How many tasks wait for their environments whose KV is still worth its price, or would be if it had not gone
        earlier. Counts only: nothing becomes due by it."""
        for kind, worth in self._worth.items():
            enough_s = hold_s(kind)
            while worth and now_s >= next(iter(worth.values())).since_s + enough_s:
                worth.popitem(last=False)
        return sum(len(worth) for worth in self._worth.values())

    def next_due_s(self, now_s: float, hold_s: HoldS) -> float:
        """When the next one is due, after `now_s`; infinite: never."""
        moments = [next(iter(held.values())).since_s + hold_s(kind) for kind, held in self._held.items() if held]
        if self._ready:
            moments.append(next(iter(self._ready.values())).ready_s + hold_s(None))
        return min((moment for moment in moments if moment > now_s), default=math.inf)

    def _find_due(self, now_s: float, price: Price, hold_s: HoldS | None) -> None:
        """Takes note of those held for long enough, and of the price that this follows from."""
        for kind, held in self._held.items():
            enough_s = 0.0 if hold_s is None else hold_s(kind)
            while held and now_s >= next(iter(held.values())).since_s + enough_s:
                self._let_go(held.popitem(last=False)[1], now_s, price)
        enough_s = 0.0 if hold_s is None else hold_s(None)
        while self._ready and now_s >= next(iter(self._ready.values())).ready_s + enough_s:
            self._let_go(self._ready.popitem(last=False)[1], now_s, price)

    def _let_go(self, resident: Resident, now_s: float, price: Price) -> None:
        resident.price = price
        self._charges.due(resident, True)
        self._due.add(resident, now_s)

    def _forget(self, resident: Resident) -> None:
        """Its environment does not work any more."""
        self._worth[resident.kind].pop(resident.key, None)
