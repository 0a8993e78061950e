"""`compare`: one workload under several strategies, in virtual time or live, one after the other.

Same file, same overrides, same seed; only `schedule.strategy` changes and, where a name says so (`areal+ctb`),
`rollout.kv_policy`. What a strategy does not use of the shared file is dropped for it and listed. Figures are those of
`train` and `simulate`: nothing is computed here but ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiderl.api.live import train
from tiderl.api.virtual import simulate
from tiderl.config.load import Loaded, load_config
from tiderl.config.machine import prepare
from tiderl.data.errors import ConfigurationError, RunStopped
from tiderl.schedule.strategy import get

STRATEGY_KEY = "schedule.strategy"
KV_POLICY_KEY = "rollout.kv_policy"
KV_POLICIES = ("lru", "ctb")
"""What may follow a strategy's name after a `+`."""


@dataclass(frozen=True)
class Comparison:
    """Results by the names given, in the order asked for."""

    workload: dict[str, Any]
    strategies: dict[str, dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        return {"workload": self.workload, "strategies": self.strategies}


def compare(
    config: str | Path,
    strategies: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    live: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Runs the file under each of `strategies`, names such as `areal`, `areal+lru` and `areal+ctb`. `progress` gets a
    line before each run, and every few seconds of a simulation.

    Every strategy is checked before the first runs. Each result has `goodput_ratio`, its goodput over the first
    strategy's, and `rho_common`, its goodput over the largest of the strategies' bounds, which holds for all of them.
    Raises `ConfigurationError` for an unknown or repeated strategy or KV policy, `RunStopped` when interrupted, and
    what `train` and `simulate` raise.
    """
    loaded = _check(config, strategies, overrides)
    runs = {name: [*overrides, *_changes(name)] for name in strategies}
    _check_differ(config, runs, live)
    results: dict[str, dict[str, Any]] = {}
    for number, (name, changed) in enumerate(runs.items(), start=1):
        place = f"{name} ({number} of {len(runs)})"
        progress(place)
        if live:
            named = [f"run={loaded.config.run}-{name}"] if loaded.config.run else []
            results[name] = train(config, [*changed, *named]).to_json()
            if results[name]["outcome"] == "stopped":
                raise RunStopped(
                    f"stopped in {name}, strategy {number} of {len(runs)}; nothing is compared",
                    where=str(results[name]["run_dir"]),
                    hint="what each strategy did is in its run directory",
                )
        else:
            results[name] = _simulated(config, changed, place, progress)
    first = results[strategies[0]]["goodput_tokens_per_s"]
    bounds = [result["bound_tokens_per_s"] for result in results.values()]
    # Each is bounded by its own, so all are by the largest; without one for each there is none in common.
    common = max(bounds) if None not in bounds else None
    for result in results.values():
        own = result["goodput_tokens_per_s"]
        result["goodput_ratio"] = own / first if own is not None and first else None
        result["rho_common"] = own / common if own is not None and common else None
    return Comparison({**_workload(loaded, live), "common_bound_tokens_per_s": common}, results)


def _simulated(
    config: str | Path, changed: Sequence[str], place: str, progress: Callable[[str], None]
) -> dict[str, Any]:
    try:
        return simulate(config, changed, progress=lambda line: progress(f"{place}: {line}")).to_json()
    except RunStopped as stopped:
        raise RunStopped(f"{place}: {stopped.what} or compared") from None


def _check(config: str | Path, strategies: Sequence[str], overrides: Sequence[str]) -> Loaded:
    if not strategies:
        raise ConfigurationError("no strategy to compare", where="--strategies", hint="e.g. --strategies sync,areal")
    twice = sorted({name for name in strategies if strategies.count(name) > 1})
    if twice:
        raise ConfigurationError(f"{twice[0]} is named twice", where="--strategies")
    if any(text.partition("=")[0].strip() == STRATEGY_KEY for text in overrides):
        raise ConfigurationError(f"{STRATEGY_KEY} is what is compared", where="-o", hint="name it in --strategies")
    for name in strategies:
        strategy, plus, policy = name.partition("+")
        if plus and policy not in KV_POLICIES:
            what = f"unknown KV policy {policy!r} in {name!r}"
            raise ConfigurationError(what, where="--strategies", hint=f"after + comes {' or '.join(KV_POLICIES)}")
        if plus and any(text.partition("=")[0].strip() == KV_POLICY_KEY for text in overrides):
            what = f"{KV_POLICY_KEY} is what is compared in {name!r}"
            raise ConfigurationError(what, where="-o", hint="name it in --strategies alone")
        try:
            get(strategy)
        except ConfigurationError as error:
            raise ConfigurationError(error.what, where="--strategies", hint=error.hint) from None
    return load_config(config, overrides)


def _changes(name: str) -> list[str]:
    """The overrides that a name stands for."""
    strategy, _, policy = name.partition("+")
    return [f"{STRATEGY_KEY}={strategy}", *([f"{KV_POLICY_KEY}={policy}"] if policy else [])]


def _check_differ(config: str | Path, runs: Mapping[str, Sequence[str]], live: bool) -> None:
    """Every run resolves, and to another one than those before it."""
    seen: dict[tuple[str, str], str] = {}
    for name, changed in runs.items():
        resolved = prepare(config, changed, command="train" if live else "sim")
        same = seen.setdefault((resolved.strategy.name, resolved.config.rollout.kv_policy), name)
        if same != name:
            what = f"{same} and {name} are the same: rollout.kv_policy is {resolved.config.rollout.kv_policy} in both"
            raise ConfigurationError(what, where="--strategies")


def _workload(loaded: Loaded, live: bool) -> dict[str, Any]:
    config = loaded.config
    return {
        "config": loaded.path.name,
        "clock": "real" if live else "virtual",
        "seed": config.seed,
        "ranks": config.cluster.ranks,
        "updates": config.train.updates,
        "groups": config.train.global_batch_groups,
        "group_size": config.algorithm.group_size,
    }
