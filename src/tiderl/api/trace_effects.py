"""Which keys of `-o` change nothing in a replay: that is said (I12), and measured figures stay beside the prediction.

A recorded workload, and costs fitted to a run, replace what some keys give. Whether a key of the costs still counts is
read off the simulated costs with and without it, not listed. Runs nothing and reads no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tiderl.config.check import IMAGE_KEYS, NoEffect
from tiderl.config.schema import Config, EnvConfig, SimConfig
from tiderl.data.errors import ConfigurationError

RECORDED = ("sim.workload", "sim.workload_seed", "env.wait")
"""What a recorded workload replaces."""
COSTS = ("sim.cost", "sim.hardware", "sim.model", "sim.efficiency")
SERVED = ("env.workers", "env.isolation")
"""What only a replay of recorded calls models in virtual time."""


def ignored_in_replay(
    config: Config,
    given: Iterable[str],
    *,
    where: str,
    serves: bool,
    costs_of: str | None,
    costs: Callable[[Config], object],
) -> Iterator[NoEffect]:
    """Of the dotted leaf keys `given` by `-o`, those that the replay ignores, a mapping of `RECORDED` once.

    `where`: the recorded workload. `serves`: its environment calls wait for a worker. `costs_of`: the run to which
    costs were fitted, None for none. `costs`: what a configuration makes work cost, to compare.
    """
    given = sorted(given)
    for key in RECORDED:
        if any(within(one, key) for one in given):
            yield NoEffect(key, f"lengths and waits are those recorded in {where}")
    for key in given:
        if key in IMAGE_KEYS:
            yield NoEffect(key, f"the observations recorded in {where} are no images")
        elif key in SERVED and not serves:
            yield NoEffect(key, f"the calls recorded in {where} do not wait for a worker")
        elif key == "env.workers" and isinstance(config.env, EnvConfig) and config.env.isolation != "pool":
            yield NoEffect(key, f"it counts for isolation pool, not {config.env.isolation}")
        elif costs_of is not None and any(within(key, one) for one in COSTS) and _same_without(config, key, costs):
            yield NoEffect(key, f"the costs are those fitted to {costs_of}")


def within(key: str, around: str) -> bool:
    """Whether `key` is `around` or a part of it."""
    return key == around or key.startswith(f"{around}.")


def given_keys(overrides: Sequence[str]) -> set[str]:
    return {override.partition("=")[0].strip() for override in overrides}


def named_by(key: str, given: set[str]) -> bool:
    """Whether an override names the key, a mapping around it or a part of it."""
    return any(within(key, one) or within(one, key) for one in given)


def _same_without(config: Config, key: str, costs: Callable[[Config], object]) -> bool:
    costing = costs(config)
    try:
        return costs(_without(config, key)) == costing
    except ConfigurationError:
        return False  # another key needs this one


def _without(config: Config, key: str) -> Config:
    """`config` with this key of `sim` at its default, or without this constant or factor."""
    _, name, *inner = key.split(".")
    value = getattr(SimConfig(), name)
    if inner:
        value = {one: number for one, number in getattr(config.sim, name).items() if one != inner[0]}
    return config.model_copy(update={"sim": config.sim.model_copy(update={name: value})})
