"""How full a pool of KV will be: mean and variance over the coming turns, of tasks that grow and end independently.

A task with context c and k turns done has, h turns from now, the context c + h·g if it still runs, which it does with
chance p. So the pool holds Σ p·(c + h·g) with variance Σ p(1 − p)(c + h·g)², plus what growth itself varies. Both are
sums over the tasks of 1, c and c²: by k these are kept, so a forecast costs the same for ten tasks and ten thousand.
Statistical multiplexing: reserving mean + z·σ of the sum instead of the sum of peaks is what lets tasks in different
phases share the room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tiderl.schedule.growth import GrowthTables


@dataclass
class Population:
    """Tasks in flight of one kind, by steps done: how many, their context tokens and the squares of these."""

    steps: int
    sums: np.ndarray = field(init=False)  # float64 [K, 3]

    def __post_init__(self) -> None:
        self.sums = np.zeros((self.steps, 3))

    def add(self, step: int, tokens: float, sign: int = 1) -> None:
        row = self.sums[step]
        row[0] += sign
        row[1] += sign * tokens
        row[2] += sign * tokens * tokens

    def remove(self, step: int, tokens: float) -> None:
        self.add(step, tokens, -1)

    @property
    def tokens(self) -> float:
        return float(self.sums[:, 1].sum())


@dataclass(frozen=True)
class Share:
    """One kind's part of a pool. `resident`: the share r of their time for which its tasks hold KV: p becomes p·r."""

    population: Population
    tables: GrowthTables
    resident: float = 1.0

    @cached_property
    def moments(self) -> np.ndarray:
        """float64 [2·H, 3·K]: times the flat sums of a population, mean and then variance after every number of steps.

        The variance of p·r is p·r(1 − p·r) = r²·p(1 − p) + r(1 − r)·p.
        """
        tables, r = self.tables, self.resident
        held, grown = r * tables.alive, tables.grown_tokens[:, None]
        doubt = r * r * tables.alive * (1.0 - tables.alive) + r * (1.0 - r) * tables.alive
        zero = np.zeros_like(held)
        mean = np.stack([held * grown, held, zero], axis=2)
        variance = np.stack(
            [doubt * grown * grown + held * tables.grown_variance[:, None], 2.0 * doubt * grown, doubt], axis=2
        )
        return np.concatenate([mean, variance]).reshape(2 * len(held), -1)


def forecast(shares: Sequence[Share], newcomers: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the tokens held, float64 [H] each, for every number of steps from now. All kinds have the
    same number of steps.

    `newcomers`: tasks without a turn, their tokens and the squares of these, float64 [kinds, 3] like a row of
    `Population.sums`, in the order of the shares.
    """
    found = np.zeros(2 * shares[0].population.steps)
    for number, share in enumerate(shares):
        found += share.moments @ share.population.sums.ravel()
        if newcomers is not None:
            found += share.moments[:, :3] @ newcomers[number]
    return found[: len(found) // 2], found[len(found) // 2 :]


def peak(mean: np.ndarray, variance: np.ndarray, z: float) -> float:
    """The largest mean + z·σ."""
    return float((mean + z * np.sqrt(np.maximum(variance, 0.0))).max())
