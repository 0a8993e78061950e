"""How the tasks of one kind grow: how many turns they take, and how many tokens each turn adds.

Learned from what has happened, running tasks included: the chance that a task goes on after turn k is estimated from
all that got so far, and the chance to get beyond turn k is their product (Kaplan and Meier, "Nonparametric estimation
from incomplete observations", 1958). Before there is data a weak prior stands in.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

PRIOR_TASKS = 4.0
"""Weight of the prior, in tasks: four that end with the same chance after each turn, half way through on average."""

REMEMBERED_TURNS = 512
"""For lengths: recent enough to follow a policy that changes."""

SAID_QUANTILE = 0.8
"""Of what turns sample: who says more grows past its reservation, and the engine makes room (I4)."""
SAID_REFRESH = 16
"""Turns after which what turns sample is looked at again."""
FIRST_TURNS = 16
"""Before so many turns have ended, one may sample all that it may."""

FIRST_TASKS = 8
"""Before so many contexts, nothing is said about their mean."""
ALIKE = 0.25
"""Standard deviation of first contexts, of their mean, up to which they are taken as alike."""

CLASSES = 64
"""Numbers of turns told apart; of longer tasks several numbers share a class."""


@dataclass(frozen=True)
class GrowthTables:
    """What the forecast needs of a kind. Index h: steps from now, k: steps done; a step is `step_turns` turns.

    `alive[h, k]`: the chance that a task with k steps done has not ended h steps later. `grown_tokens[h]` and
    `grown_variance[h]`: what those add to its context by then.
    """

    alive: np.ndarray  # float64 [H, K]
    grown_tokens: np.ndarray  # float64 [H]
    grown_variance: np.ndarray  # float64 [H]
    left_turns: np.ndarray  # float64 [K]: turns still to come


class Recent:
    """The last whole numbers: mean and variance without going through them."""

    def __init__(self) -> None:
        self._values: deque[int] = deque(maxlen=REMEMBERED_TURNS)
        self._sum = self._squares = 0  # exact: they never drift

    def __len__(self) -> int:
        return len(self._values)

    def append(self, value: int) -> None:
        if len(self._values) == REMEMBERED_TURNS:
            self._sum -= self._values[0]
            self._squares -= self._values[0] ** 2
        self._values.append(value)
        self._sum += value
        self._squares += value**2

    @property
    def mean(self) -> float:
        """0 without any."""
        return self._sum / len(self._values) if self._values else 0.0

    @property
    def variance(self) -> float:
        """0 without any."""
        count = len(self._values)
        return (count * self._squares - self._sum**2) / count**2 if count else 0.0

    def quantile(self, share: float) -> float:
        """By linear interpolation, as numpy's, which takes ten times longer for a few hundred. There are some."""
        ordered = sorted(self._values)
        place = share * (len(ordered) - 1)
        below = int(place)
        low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
        part = place - below
        return low + (high - low) * part if part < 0.5 else high - (high - low) * (1.0 - part)


class TaskGrowth:
    """Observations of one kind of task (an environment, training or evaluation)."""

    def __init__(self, max_turns: int, max_context_tokens: int) -> None:
        self.step_turns = -(-max_turns // CLASSES)
        self.steps = -(-max_turns // self.step_turns)
        self._done = np.full(self.steps, PRIOR_TASKS * self.step_turns)  # turns, by class
        self._ended = 2.0 / (max_turns + 1) * self._done  # of these, the last ones
        self._grown, self._first, self._said = Recent(), Recent(), Recent()
        self.context_tokens = 0.0
        """Of a task at the ends of its turns, on average; 0 before any."""
        self._said_turns = 0
        self._reserves = (0, 0)  # where giving way is dear, and where it is cheap
        self._reserves_at = -SAID_REFRESH  # turns that there were
        self._unknown_growth = 2.0 * max_context_tokens / max_turns
        self._tables: GrowthTables | None = None
        self._stale = 0

    def step_of(self, turns: int) -> int:
        """The class of a task with so many turns done."""
        return min(turns // self.step_turns, self.steps - 1)

    def started(self, context_tokens: int) -> None:
        """A task's first turn begins with this context."""
        self._first.append(context_tokens)

    def went_on(self, turns: int, grown_tokens: int) -> None:
        """A task begins another turn after `turns` of them, its context `grown_tokens` longer than at the last."""
        self._done[self.step_of(turns - 1)] += 1.0
        self._grown.append(grown_tokens)
        self._stale += 1

    def ended(self, turns: int) -> None:
        """A task is over after `turns` turns, at least 1."""
        step = self.step_of(turns - 1)
        self._done[step] += 1.0
        self._ended[step] += 1.0
        self._stale += 1

    def first_tokens(self, z: float) -> float | None:
        """Context of a first turn: mean and `z` standard deviations; None before any."""
        return self._first.mean + z * math.sqrt(self._first.variance) if self._first else None

    @property
    def first_is_known(self) -> bool:
        """Whether first contexts are so alike that a group need not be probed for its own."""
        first = self._first
        return len(first) >= FIRST_TASKS and math.sqrt(first.variance) <= ALIKE * first.mean

    def said(self, new_tokens: int, context_tokens: int) -> None:
        """A turn has sampled so many tokens, and its context has so many then."""
        self._said.append(new_tokens)
        self._said_turns += 1
        self.context_tokens += (context_tokens - self.context_tokens) / min(self._said_turns, REMEMBERED_TURNS)

    def reserved_tokens(self, max_new_tokens: int, *, cheap: bool = False) -> int:
        """Room for what a turn will sample: half of the quantile of what turns did, all it may before enough did.

        Turns that run together are at different places: on average each has said half of what it will. `cheap`: a turn
        that gives way comes back soon, so half of the mean will do.
        """
        if self._said_turns < FIRST_TURNS:
            return max_new_tokens
        if self._said_turns - self._reserves_at >= SAID_REFRESH:
            said, self._reserves_at = self._said, self._said_turns
            self._reserves = (math.ceil(said.quantile(SAID_QUANTILE) / 2.0), math.ceil(said.mean / 2.0))
        return min(max_new_tokens, self._reserves[cheap])

    @property
    def growth_tokens(self) -> float:
        """Mean of what a turn adds. Before enough did: what fills the longest context in half of the turns."""
        return self._grown.mean if len(self._grown) >= FIRST_TASKS else self._unknown_growth

    def tables(self) -> GrowthTables:
        """As of the newest observations but for the last few: they are made anew when enough has changed."""
        if self._tables is None or self._stale * 8 > len(self._grown):
            self._tables, self._stale = self._computed(), 0
        return self._tables

    def _computed(self) -> GrowthTables:
        steps = self.steps
        goes_on = (1.0 - self._ended / self._done) ** self.step_turns
        goes_on[-1] = 0.0
        alive = np.zeros((steps, steps))
        alive[0] = 1.0
        for h in range(1, steps):
            alive[h, : steps - h] = alive[h - 1, : steps - h] * goes_on[h - 1 : steps - 1]
        turns = np.arange(steps, dtype=np.float64) * self.step_turns
        left = alive[1:].sum(axis=0) * self.step_turns
        return GrowthTables(alive, turns * self.growth_tokens, turns * self._grown.variance, left)
