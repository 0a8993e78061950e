"""Who is in flight on a replica, by kind and progress, and how full they will probably make its pool: admission's view.

Books every task from its admission to its end, also while it holds no KV: it will come back. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from tiderl.schedule.charges import Charges
from tiderl.schedule.forecast import Population, Share, forecast, peak
from tiderl.schedule.growth import TaskGrowth
from tiderl.schedule.rates import EngineRates
from tiderl.schedule.residents import Kind, Resident
from tiderl.schedule.retention import Price

SOON = 2
"""Steps of the forecast that count where pausing is cheap: now, and the next."""


class Bookings:
    """`kinds` and what they know may be shared by all replicas; a kind that is new is begun. `z`: standard deviations
    for which there shall be room."""

    def __init__(
        self,
        charges: Charges,
        kinds: dict[str, Kind],
        rates: EngineRates,
        price: Callable[[], Price],
        z: float,
        *,
        max_turns: int,
        max_context_tokens: int,
    ) -> None:
        self.kinds = kinds
        self._charges, self._rates, self._price, self._z = charges, rates, price, z
        self._max_turns, self._max_context_tokens = max_turns, max_context_tokens
        self._populations: dict[str, Population] = {}
        self._shares: dict[str, Share] = {}
        self.own_tokens = 0
        """Contexts of all tasks in flight, those without KV included, without their groups' prompts."""

    @property
    def tokens(self) -> float:
        """Contexts of all tasks in flight, those without KV included, each group's prompt once."""
        return self.own_tokens + self._charges.prompt_tokens

    def expected_first_tokens(self, kind: str, group: Hashable) -> float | None:
        """Context of a first turn: the group's own where a member has begun, else `z` standard deviations above its
        kind's mean; None: nothing known."""
        known = self._charges.first_tokens(group)
        if known:
            return float(known)
        return self.kinds[kind].growth.first_tokens(self._z) if kind in self.kinds else None

    def learn(self, resident: Resident) -> None:
        """It has begun: where its group's first context is news here, the others' own parts are not what they were."""
        for member in self._charges.learn(resident):
            if member is not resident and member.booked_tokens:
                self.rebook(member, resident.first_tokens)

    def book(self, resident: Resident, context_tokens: int) -> None:
        """It has this context, and as many turns done as it says."""
        charges = self._charges
        if resident.first_tokens:
            tokens = charges.own_tokens(resident.group, context_tokens)
        else:
            tokens = charges.new_tokens(resident.kind, resident.group, context_tokens)
        population = self._population(resident.kind)
        step = self.kinds[resident.kind].growth.step_of(resident.turns)
        population.add(step, tokens)
        self.own_tokens += tokens
        resident.booked_tokens, resident.booked_step = tokens, step

    def unbook(self, resident: Resident) -> None:
        if resident.booked_tokens:
            self._populations[resident.kind].remove(resident.booked_step, resident.booked_tokens)
            self.own_tokens -= resident.booked_tokens
            resident.booked_tokens = 0

    def rebook(self, resident: Resident, context_tokens: int) -> None:
        self.unbook(resident)
        self.book(resident, context_tokens)

    def peak_tokens(self, kind: str, group: Hashable, context_tokens: int, tasks: int, *, resident: float) -> float:
        """The most that the pool will hold with so many more tasks with such a first context, of all of which the share
        `resident` holds KV: mean and `z` standard deviations; where pausing is cheap, the mean of now and the next
        step."""
        mean, variance = self._forecast(kind, group, context_tokens, tasks, resident)
        z, steps = self._z, None
        if self._rates.known and self._price().hold_s < self._rates.active_s:
            # Bringing KV back costs less than leaving room idle for a turn: who does not fit later is paused then.
            z, steps = 0.0, SOON
        return peak(mean[:steps], variance[:steps], z) + self._charges.expected_prompt_tokens(resident)

    def mean_peak_tokens(
        self, kind: str, group: Hashable, context_tokens: int, tasks: int, *, resident: float
    ) -> float:
        """As `peak_tokens`, on average and over all that is to come, whatever pausing costs."""
        mean, variance = self._forecast(kind, group, context_tokens, tasks, resident)
        return peak(mean, variance, 0.0) + self._charges.expected_prompt_tokens(resident)

    def _forecast(
        self, kind: str, group: Hashable, context_tokens: int, tasks: int, resident: float
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens = self._charges.new_tokens(kind, group, context_tokens)
        self._population(kind)
        shares = [self._share(name) for name in self._populations]
        newcomers = np.zeros((len(shares), 3))
        newcomers[list(self._populations).index(kind)] = (tasks, tasks * tokens, tasks * tokens * tokens)
        return forecast(shares, newcomers, resident=resident)

    def _population(self, kind: str) -> Population:
        population = self._populations.get(kind)
        if population is None:
            if kind not in self.kinds:
                self.kinds[kind] = Kind(TaskGrowth(self._max_turns, self._max_context_tokens))
            population = self._populations[kind] = Population(self.kinds[kind].growth.steps)
        return population

    def _share(self, kind: str) -> Share:
        share, tables = self._shares.get(kind), self.kinds[kind].growth.tables()
        if share is None or share.tables is not tables:
            share = self._shares[kind] = Share(self._populations[kind], tables)
        return share
