"""What `-o` changes nothing of in a replay, so that it is said and measured figures stay beside the prediction (I12).

A recorded workload and costs fitted to a run replace what some keys give. Whether a cost still counts is read off the
simulated world with and without it, not listed. Runs nothing and reads no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tiderl.config.check import NoEffect
from tiderl.config.schema import Config, SimConfig

RECORDED = ("sim.workload", "sim.workload_seed", "env.wait")
"""What a recorded workload replaces."""
FITTED = ("sim.cost", "sim.hardware", "sim.model", "sim.efficiency")
SERVED = ("env.workers", "env.isolation")


def without_effect_in_replay(
    config: Config,
    given: set[str],
    *,
    where: str,
    costs_of: str | None,
    serves: bool,
    same_world: Callable[[Config], bool],
) -> tuple[NoEffect, ...]:
    """Of the dotted keys `given` by `-o`, those that the replay ignores.

    `where`: the recorded workload. `costs_of`: the run to which costs were fitted, None for none. `serves`: its
    environment calls wait for a worker. `same_world`: whether another configuration costs the same.
    """
    return tuple(sorted(_ignored(config, given, where, costs_of, serves, same_world), key=lambda item: item.key))


def _ignored(
    config: Config,
    given: set[str],
    where: str,
    costs_of: str | None,
    serves: bool,
    same_world: Callable[[Config], bool],
) -> Iterator[NoEffect]:
    for key in given:
        plain = without_place(key)
        if within(plain, RECORDED):
            yield NoEffect(key, f"lengths and waits are those recorded in {where}")
        elif not serves and plain in SERVED:
            yield NoEffect(key, f"the calls recorded in {where} do not wait for a worker")
        elif plain == "env.workers" and (isolation := _isolation(config, key)) != "pool":
            yield NoEffect(key, f"it counts for isolation pool, not {isolation}")
        elif costs_of is not None and within(key, FITTED) and same_world(_at_default(config, key)):
            yield NoEffect(key, f"the costs are those fitted to {costs_of}")


def within(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def without_place(key: str) -> str:
    """Of an environment of a mixture (`env.1.wait`), the key that a single one has."""
    names = key.split(".")
    return ".".join(name for at, name in enumerate(names) if not (at == 1 and names[0] == "env" and name.isdigit()))


def _isolation(config: Config, key: str) -> str:
    place = key.split(".")[1]
    return list(config.environments.values())[int(place) if place.isdigit() else 0].isolation


def _at_default(config: Config, key: str) -> Config:
    """`config` without the key of `sim`, or without the one constant or factor of it."""
    _, name, *inner = key.split(".")
    value = getattr(config.sim, name)
    if inner:
        value = {constant: number for constant, number in value.items() if constant != inner[0]}
    else:
        value = getattr(SimConfig(), name)
    return config.model_copy(update={"sim": config.sim.model_copy(update={name: value})})
