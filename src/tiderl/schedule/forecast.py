"""How full a pool of KV will be: mean and variance over the coming turns, of tasks that grow and end independently.

A task with context c and k turns done has, h turns from now, the context c + h·g if it still runs, which it does with
chance p. So the pool holds Σ p·(c + h·g) with variance Σ p(1 − p)(c + h·g)², plus what growth itself varies. Summed by
k: a forecast costs the same for ten tasks and ten thousand. Statistical multiplexing: reserving mean + z·σ of the sum
instead of the sum of peaks is what lets tasks in different phases share the room.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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
    def tasks(self) -> int:
        return round(float(self.sums[:, 0].sum()))

    @property
    def tokens(self) -> float:
        return float(self.sums[:, 1].sum())


@dataclass(frozen=True)
class Share:
    """One kind's part of a pool. `resident`: the share of their time for which its tasks hold KV."""

    population: Population
    tables: GrowthTables
    resident: float = 1.0


def forecast(shares: Iterable[Share], extra: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the tokens held, float64 [H] each, for every number of steps from now.

    `extra`: tokens and squares of newcomers, float64 [kinds, 3] like a row of `Population.sums`, in the order of the
    shares.
    """
    mean, variance = np.zeros(1), np.zeros(1)
    for number, share in enumerate(shares):
        tables, sums = share.tables, share.population.sums
        if extra is not None and extra[number, 0]:
            sums = sums.copy()
            sums[0] += extra[number]
        grown = tables.grown_tokens
        alive = tables.alive @ sums  # [H, 3]
        tokens = alive[:, 1] + grown * alive[:, 0]
        squares = alive[:, 2] + grown * (2.0 * alive[:, 1] + grown * alive[:, 0])
        if share.resident == 1.0:
            doubt = tables.doubt @ sums
            spread = doubt[:, 2] + grown * (2.0 * doubt[:, 1] + grown * doubt[:, 0])
        else:  # p becomes p·r, and p·r·(1 − p·r) = r²·p(1 − p) + r(1 − r)·p
            r = share.resident
            doubt = tables.doubt @ sums
            spread = doubt[:, 2] + grown * (2.0 * doubt[:, 1] + grown * doubt[:, 0])
            spread = r * r * spread + r * (1.0 - r) * squares
            tokens = r * tokens
        spread = spread + tables.grown_variance * alive[:, 0]
        mean, variance = _sum(mean, tokens), _sum(variance, spread)
    return mean, variance


def peak(mean: np.ndarray, variance: np.ndarray, z: float) -> float:
    """The largest mean + z·σ."""
    return float(np.max(mean + z * np.sqrt(np.maximum(variance, 0.0))))


def _sum(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    if len(one) == len(other):
        return one + other
    longer, shorter = (one, other) if len(one) > len(other) else (other, one)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total
