"""What may change when a run is resumed: how long, how it is watched, and on what it runs; never what it learns.

The run's own configuration file holds every other key, so that a resumed run is the same run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tiderl.config.load import leaves
from tiderl.data.errors import ConfigurationError

MAY_CHANGE = (
    "train.updates",
    "eval.",
    "log.",
    "checkpoint.",
    "cluster.",
    "env.workers",
    "env.isolation",
    "env.deadline_s",
)
"""Keys, or sections with a final point."""


def resume_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides for a resumed run. Raises `ConfigurationError` for a key that may not change."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    for key in keys:
        if not _may_change(key):
            raise ConfigurationError(
                f"{key} may not change when a run is resumed",
                where=f"-o {key}",
                hint=f"what may: {', '.join(key.rstrip('.') for key in MAY_CHANGE)}; else start a new run",
            )
    return with_ranks(overrides)


def with_ranks(overrides: Sequence[str]) -> list[str]:
    """Overrides of a run's own file, which holds the number that `auto` became for its number of ranks."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    if "cluster.ranks" in keys and "cluster.rollout_ranks" not in keys:
        return [*overrides, "cluster.rollout_ranks=auto"]
    return list(overrides)


def refuse_edits(accepted: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Compares the run's configuration with the one that its last driver ran with. Raises `ConfigurationError` that
    names what was edited by hand and may not change."""
    before, after = dict(leaves(accepted)), dict(leaves(now))
    edited = [key for key in before | after if before.get(key) != after.get(key) and not _may_change(key)]
    if edited:
        shown = ", ".join(f"{key} was {before.get(key)!r} and is {after.get(key)!r}" for key in edited[:3])
        raise ConfigurationError(
            f"the configuration of this run was changed: {shown}",
            where=where,
            hint="a resumed run must stay the same run: take the change back, or start a new one",
        )


def _may_change(key: str) -> bool:
    return any(key == allowed or (allowed.endswith(".") and key.startswith(allowed)) for allowed in MAY_CHANGE)
