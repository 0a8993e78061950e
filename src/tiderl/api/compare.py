"""`compare`: one workload under several strategies, in virtual time or live, one after the other.

Same file, same overrides, same seed; only `schedule.strategy` changes. What a strategy does not use of the shared file
is dropped for it and listed. Figures are those of `train` and `simulate`: nothing is computed here but ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class Comparison:
    """Results by strategy, in the order asked for."""

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
    """Runs the file under each of `strategies`. `progress` gets a line before each run.

    Every strategy is checked before the first runs. Each result has `goodput_ratio`, its goodput over the first
    strategy's, and `rho_common`, its goodput over the largest of the strategies' bounds, which holds for all of them.
    Raises `ConfigurationError` for an unknown or repeated strategy, and what `train` and `simulate` raise.
    """
    loaded = _check(config, strategies, overrides)
    runs = {name: [*overrides, f"{STRATEGY_KEY}={name}"] for name in strategies}
    for changed in runs.values():
        prepare(config, changed, command="train" if live else "sim")
    results: dict[str, dict[str, Any]] = {}
    for number, (name, changed) in enumerate(runs.items(), start=1):
        progress(f"{name} ({number} of {len(runs)})")
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
            results[name] = simulate(config, changed).to_json()
    first = results[strategies[0]]["goodput_tokens_per_s"]
    bounds = [result["bound_tokens_per_s"] for result in results.values()]
    # Each is bounded by its own, so all are by the largest; without one for each there is none in common.
    common = max(bounds) if None not in bounds else None
    for result in results.values():
        own = result["goodput_tokens_per_s"]
        result["goodput_ratio"] = own / first if own is not None and first else None
        result["rho_common"] = own / common if own is not None and common else None
    return Comparison({**_workload(loaded, live), "common_bound_tokens_per_s": common}, results)


def _check(config: str | Path, strategies: Sequence[str], overrides: Sequence[str]) -> Loaded:
    if not strategies:
        raise ConfigurationError("no strategy to compare", where="--strategies", hint="e.g. --strategies sync,areal")
    twice = sorted({name for name in strategies if strategies.count(name) > 1})
    if twice:
        raise ConfigurationError(f"{twice[0]} is named twice", where="--strategies")
    if any(text.partition("=")[0].strip() == STRATEGY_KEY for text in overrides):
        raise ConfigurationError(f"{STRATEGY_KEY} is what is compared", where="-o", hint="name it in --strategies")
    for name in strategies:
        try:
            get(name)
        except ConfigurationError as error:
            raise ConfigurationError(error.what, where="--strategies", hint=error.hint) from None
    return load_config(config, overrides)


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
