"""How full a pool of KV will be: mean and variance over the coming turns, of tasks that grow and end independently.

A task with context c and k turns done has, h turns from now, the context c + h·g if it still runs, which it does with
chance p. So the pool holds Σ p·(c + h·g) with variance Σ p(1 − p)(c + h·g)², plus what growth itself varies. Both are
sums over the tasks of 1, c and c²: by k these are kept, so a forecast costs the same for ten tasks and ten thousand.
Statistical multiplexing: reserving mean + z·σ of the sum instead of the sum of peaks is what lets tasks in different
phases share the room.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tiderl.schedule.growth import GrowthTables


@dataclass
class Population:
    """Tasks in flight of one kind, by steps done: how many, their context tokens and the squares of these."""

    steps: int
    sums: array[float] = field(init=False)  # [K·3]: numpy takes several times longer to change one

    def __post_init__(self) -> None:
        self.sums = array("d", bytes(3 * 8 * self.steps))

    def add(self, step: int, tokens: float, sign: int = 1) -> None:
        sums, row = self.sums, 3 * step
        sums[row] += sign
        sums[row + 1] += sign * tokens
        sums[row + 2] += sign * tokens * tokens

    def remove(self, step: int, tokens: float) -> None:
        self.add(step, tokens, -1)


@dataclass(frozen=True)
class Share:
    """One kind's part of a pool."""

    population: Population
    tables: GrowthTables

    @cached_property
    def moments(self) -> np.ndarray:
        """float64 [4·H, 3·K]: times the flat sums of a population, after every number of steps the mean, and the three
        parts of the variance: Σ p(1 − p)(c + h·g)², Σ p(c + h·g)² and what growth varies, Σ p·v."""
        alive, grown = self.tables.alive, self.tables.grown_tokens[:, None]
        zero = np.zeros_like(alive)

        def squared(weight: np.ndarray) -> np.ndarray:
            return np.stack([weight * grown * grown, 2.0 * weight * grown, weight], axis=2)

        mean = np.stack([alive * grown, alive, zero], axis=2)
        varied = np.stack([alive * self.tables.grown_variance[:, None], zero, zero], axis=2)
        parts = np.concatenate([mean, squared(alive * (1.0 - alive)), squared(alive), varied])
        return parts.reshape(4 * len(alive), -1)


def forecast(
    shares: Sequence[Share], newcomers: np.ndarray | None = None, *, resident: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the tokens held, float64 [H] each, for every number of steps from now. All kinds have the
    same number of steps.

    `newcomers`: tasks without a turn, their tokens and the squares of these, float64 [kinds, 3] like a row of
    `Population.sums`, in the order of the shares. `resident`: the share r of the tasks that hold KV: p becomes p·r,
    whose variance p·r(1 − p·r) is r²·p(1 − p) + r(1 − r)·p.
    """
    steps = shares[0].population.steps
    found = np.zeros(4 * steps)
    for number, share in enumerate(shares):
        found += share.moments @ np.frombuffer(share.population.sums)
        if newcomers is not None:
            found += share.moments[:, :3] @ newcomers[number]
    mean, ends, lives, varies = found.reshape(4, steps)
    return resident * mean, resident * resident * ends + resident * (1.0 - resident) * lives + resident * varies


def peak(mean: np.ndarray, variance: np.ndarray, z: float) -> float:
    """The largest mean + z·σ."""
    return float((mean + z * np.sqrt(np.maximum(variance, 0.0))).max())
