"""What may change when a run is resumed: how long, how it is watched, and on what it runs; never what it learns.

The run's own configuration file holds every other key, so that a resumed run is the same run.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        if not any(key == allowed or (allowed.endswith(".") and key.startswith(allowed)) for allowed in MAY_CHANGE):
            raise ConfigurationError(
                f"{key} may not change when a run is resumed",
                where=f"-o {key}",
                hint=f"what may: {', '.join(key.rstrip('.') for key in MAY_CHANGE)}; else start a new run",
            )
    # The file holds the number that `auto` became for the old number of ranks.
    if "cluster.ranks" in keys and "cluster.rollout_ranks" not in keys:
        return [*overrides, "cluster.rollout_ranks=auto"]
    return list(overrides)
