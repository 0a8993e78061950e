"""Which task comes first: the order in which paused tasks resume, and in which waiting ones lose their KV.

`tiers` is the published rule P = ω1·evaluation + ω2·group completion + ω3·active + ω4·context, in that order
lexicographically; `weighted` sums it with weights of one's own; `deadlines` is the alternative: who must start now to
be in time for the last update that may consume its group, then the shortest remaining group work when the trainer
starves and the longest when it has enough. Above all of them stands age: who waited beyond the patience goes first,
oldest first, so that nobody waits without bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

PriorityName = Literal["tiers", "weighted", "deadlines"]
Key = tuple[float, ...]
"""Larger goes first."""


@dataclass(frozen=True)
class Weights:
    """ω1 to ω4 of `weighted`. Raises `ValueError` for one that is negative or not finite."""

    evaluation: float = 8.0
    group: float = 4.0
    active: float = 2.0
    context: float = 1.0

    def __post_init__(self) -> None:
        for name in WEIGHTS:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"the weight of {name} is {value}: it must be a number of at least 0")


class TaskFacts(NamedTuple):
    """What is known of one task when it is compared: made anew several times for each decision."""

    evaluation: bool = False
    group_done_fraction: float = 0.0
    """Members of its group that are finished, of all."""
    active: bool = False
    """It generates now, or was about to."""
    context_fraction: float = 0.0
    """Its context, of the longest that is allowed."""
    remaining_tokens: float = 0.0
    """Expected work of its whole group: contexts to compute again and tokens to come."""
    latest_start_s: float = math.inf
    """The moment after which its group will probably miss the last update that may consume it."""
    starving: bool = True
    """The trainer waits for data."""


WEIGHTS = ("evaluation", "group", "active", "context")

STANDARD = Weights()
"""Each counts more than all behind it together."""


def priority(facts: TaskFacts, rule: PriorityName = "tiers", weights: Weights = STANDARD, *, now_s: float = 0.0) -> Key:
    """The task's key under a rule."""
    if rule == "weighted":
        total = (
            weights.evaluation * facts.evaluation
            + weights.group * facts.group_done_fraction
            + weights.active * facts.active
            + weights.context * facts.context_fraction
        )
        return (total,)
    if rule == "deadlines":
        if facts.evaluation:
            return (2.0, 0.0, 0.0)
        if now_s >= facts.latest_start_s:
            return (1.0, -facts.latest_start_s, 0.0)
        work = -facts.remaining_tokens if facts.starving else facts.remaining_tokens
        return (0.0, work, facts.context_fraction)
    return (float(facts.evaluation), facts.group_done_fraction, float(facts.active), facts.context_fraction)
