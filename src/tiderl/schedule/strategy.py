"""A schedule as a value: one frozen composition of the parts, and the registry of the published ones.

A strategy is data, never code: if one needed runtime code of its own, the parts would be cut wrongly (architecture
§11).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from tiderl.data.errors import ConfigurationError
from tiderl.data.settings import LossName

Consumption = Literal["whole_batch", "earliest_deadline"]
AtNewVersion = Literal["barrier", "interrupt"]


@dataclass(frozen=True)
class Strategy:
    """One schedule. `None` in a field means: what the configuration says."""

    name: str
    summary: str
    max_staleness: int | None
    """Fixed staleness bound in updates; None leaves `schedule.max_staleness` to the user."""
    consumption: Consumption
    at_new_version: AtNewVersion
    """`barrier`: a replica loads new weights only when it runs nothing. `interrupt`: at once, turns in flight
    recompute."""
    all_ranks_generate: bool
    """Every rank holds an engine and one of them also trains, with rollout waiting; else the last ranks only train."""
    kv_policy: str
    loss: LossName


BUILT = ("sync", "areal")
PLANNED = ("streamrl", "rollpacker", "laminar", "dora", "glm5", "kimi", "tide")


def registry() -> Mapping[str, Strategy]:
    """All built strategies by name."""
    return {name: get(name) for name in BUILT}


def get(name: str) -> Strategy:
    """The strategy of that name. Raises `ConfigurationError` for one that is unknown or not built yet."""
    if name in BUILT:
        strategy: Strategy = import_module(f"tiderl.schedule.strategies.{name}").STRATEGY
        return strategy
    if name in PLANNED:
        raise ConfigurationError(
            f"strategy {name!r} is not yet supported",
            where="schedule.strategy",
            hint=f"choose one of: {', '.join(BUILT)}",
        )
    close = difflib.get_close_matches(name, BUILT, n=1)
    raise ConfigurationError(
        f"unknown strategy {name!r}" + (f", did you mean {close[0]!r}?" if close else ""),
        where="schedule.strategy",
        hint=f"choose one of: {', '.join(BUILT)}",
    )
