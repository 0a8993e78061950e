"""`replay`: a recorded workload in virtual time, with costs fitted to a recorded run, against what was measured.

A run brings its workload, its configuration and its figures; a file brings a workload only. What cannot be replayed is
refused before the simulation. Predicted and measured figures come from events through the same class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiderl.api.records import RecordedRun, load_run
from tiderl.api.result import Result
from tiderl.api.trace_effects import SERVED, given_keys, ignored_in_replay, named_by
from tiderl.api.virtual import Played, Say, kept, simulated_world
from tiderl.config.load import Loaded, dump, leaves, load_config
from tiderl.config.model_folder import model_folder
from tiderl.config.render import derived_keys
from tiderl.config.resolve import Resolved, resolve, wait_profile
from tiderl.config.schema import Config
from tiderl.cost.calibrate import Calibration, calibrate
from tiderl.cost.model import CostModel
from tiderl.cost.recorded import Recording, read_recording
from tiderl.data.errors import ConfigurationError
from tiderl.data.events import Event, PromptIssued
from tiderl.data.records import TaskKey
from tiderl.data.settings import EngineSettings
from tiderl.envs.waits import wait_s
from tiderl.observe.metrics import RunMetrics
from tiderl.sim.replay import Group, TracedWorkload, groups_of_file, groups_of_run
from tiderl.sim.traces import TracedTrajectory, read_trace

COMPARED = ("step_s", "goodput_tokens_per_s", "staleness_mean_tokens")
"""Figures that are predicted and measured."""
SAME_RUN = ("run", "train.updates", "sim.", "log.")
"""Keys, and sections with a final point, that change nothing in what was measured; `train.updates` is compared with
the updates that ran, for a run may have ended before."""


@dataclass(frozen=True)
class Recorded:
    """A run directory with its facts read."""

    run: RecordedRun
    recording: Recording
    metrics: RunMetrics

    @property
    def where(self) -> str:
        return str(self.run.directory.root)

    @property
    def live(self) -> bool:
        """On real time: a simulation keeps no journal."""
        return self.run.directory.journal.exists()


def replay(
    trace: str | Path,
    overrides: Sequence[str] = (),
    *,
    config: str | Path | None = None,
    calibrated_by: str | None = None,
    save: str | None = None,
    progress: Say | None = None,
) -> Result:
    """Replays a recorded run, by name or folder, or a CSV file of turns (`sim/traces.py`).

    A run's own configuration counts, changed by `overrides`, and costs fitted to it unless `calibrated_by` names
    another run. A file is played under `config`, or the defaults with budgets that hold it. The result has the usual
    keys and, predicted and measured, those of `COMPARED`; measured ones are of the run as it was, so the errors are
    null where `overrides` change what ran. Raises `ConfigurationError`, `CheckpointError` and what `simulate` raises.
    """
    started = time.monotonic()
    if Path(trace).is_file():
        return _replay_file(Path(trace), overrides, config, calibrated_by, save, started, progress)
    _check_exists(trace)
    if config is not None:
        what = "a recorded run brings its own configuration"
        raise ConfigurationError(what, where=str(config), hint="leave the file out, change keys with -o")
    source = recorded(trace)
    _check_grows(source)
    costs = source if calibrated_by is None else recorded(calibrated_by)
    fitted = calibrated(costs)
    resolved = _configuration(source, overrides)
    groups = groups_of_run(source.recording, fitted, group_size=source.run.config.algorithm.group_size)
    workload = _workload(resolved, groups["train"], groups["eval"], source.where, fitted.score_s)
    serves = fitted.env_step_s > 0 or fitted.env_reset_s > 0
    resolved = _ignoring(resolved, overrides, workload, source.where, serves, (costs.where, fitted))
    world = simulated_world(resolved, recorded=workload)
    world = replace(world, cost=fitted.applied(world.cost))
    measured = source.metrics if _as_it_was(source, resolved) else None

    def told(run: Played) -> Result:
        return run.result(
            started,
            {
                **_compared(run.metrics, measured),
                "recycled_groups": workload.recycled(row.prompt_id for row in run.replay.prompts),
                "calibration": calibration_figures(fitted, costs.where),
            },
        )

    return kept(resolved, world, save, told, progress)


def _check_exists(trace: str | Path) -> None:
    try:
        load_run(trace)
    except ConfigurationError as error:
        raise ConfigurationError("no such run or file", where=error.where, hint=error.hint) from None


def _check_grows(source: Recorded) -> None:
    """Events do not tell what a turn's observation was where images left the context with it."""
    config = source.run.config
    workload = config.sim.workload
    shown = not source.live and not isinstance(workload, str) and workload.observation_images
    if shown and config.rollout.image_window is not None:
        what = "images left the contexts of this run (rollout.image_window), which a replay cannot do again"
        raise ConfigurationError(what, where=source.where, hint="simulate its configuration: tiderl sim CONFIG")


def recorded(run: str | Path) -> Recorded:
    """Raises `ConfigurationError` for no such run and impossible facts, `CheckpointError` for damaged events."""
    found = load_run(run)
    events = list(found.events())
    metrics = RunMetrics()
    for event in events:
        metrics.observe(event)
    live = found.directory.journal.exists()
    waits = _waits(found.config, events) if live else lambda key, turn: 0.0
    recording = read_recording(events, where=str(found.directory.root), wait_s=waits)
    return Recorded(found, recording, metrics)


def _waits(config: Config, events: Sequence[Event]) -> Callable[[TaskKey, int], float]:
    """What `env.wait` made a live step wait: a function of the run's seed. Of a mixture, training steps only."""
    profiles = {name: wait_profile(env) for name, env in config.environments.items()}
    dealt = {event.prompt_id: event.environment for event in events if isinstance(event, PromptIssued)}
    alone = None if config.is_mixture else next(iter(profiles.values()))

    def waited_s(key: TaskKey, turn: int) -> float:
        profile = alone
        if config.is_mixture:
            profile = profiles.get(dealt.get(key.prompt_id, "")) if key.split == "train" else None
        return 0.0 if profile is None else wait_s(profile, config.seed, key, turn)

    return waited_s


def calibrated(source: Recorded) -> Calibration:
    """The costs of a recorded run. Raises `ConfigurationError` for one that says too little."""
    return calibrate(source.recording, where=source.where)


def calibration_figures(fitted: Calibration, where: str) -> dict[str, Any]:
    """For a result: the constants by the names of `sim.cost`, and what they leave unexplained."""
    return {
        "run": where,
        "constants": dict(fitted.constants),
        "env_step_s": fitted.env_step_s,
        "env_reset_s": fitted.env_reset_s,
        "residuals": {name: one.to_json() for name, one in fitted.residuals.items()},
        "unknown": list(fitted.unknown),
    }


def _configuration(source: Recorded, overrides: Sequence[str]) -> Resolved:
    """The run's configuration under `overrides`, as long as the run really was unless they say otherwise.

    With overrides, what a strategy or `auto` decided in the recorded run is decided anew.
    """
    path = source.run.directory.config
    given = given_keys(overrides)
    defaults = dict(leaves(dump(Config())))
    anew = [f"{key}={defaults[key]}" for key in derived_keys(path) if key in defaults] if overrides else []
    loaded = load_config(path, [*anew, f"train.updates={_updates(source)}", *overrides])
    resolved = _resolved(loaded, live=source.live)
    return replace(resolved, no_effect=tuple(item for item in resolved.no_effect if named_by(item.key, given)))


def _updates(source: Recorded) -> int:
    return max(1, source.metrics.updates)


def _as_it_was(source: Recorded, resolved: Resolved) -> bool:
    """Whether what runs is what was measured: keys that the replay ignores do not count."""
    before, now = (dict(leaves(dump(config))) for config in (source.run.config, resolved.config))
    ignored = {item.key for item in resolved.no_effect}
    changed = [
        key
        for key in before | now
        if before.get(key) != now.get(key) and not key.startswith(SAME_RUN) and not named_by(key, ignored)
    ]
    return not changed and resolved.config.train.updates == _updates(source)


def _ignoring(
    resolved: Resolved,
    overrides: Sequence[str],
    workload: TracedWorkload,
    where: str,
    serves: bool,
    fitted: tuple[str, Calibration] | None,
) -> Resolved:
    """With what `overrides` give and the replay ignores among `no_effect`."""

    def costs(config: Config) -> tuple[CostModel, EngineSettings]:
        world = simulated_world(replace(resolved, config=config), recorded=workload)
        return (world.cost if fitted is None else fitted[1].applied(world.cost)), world.engine

    given = given_keys(overrides)
    found = ignored_in_replay(
        resolved.config,
        [key for key, origin in resolved.loaded.origins.items() if origin == "-o" and named_by(key, given)],
        where=where,
        serves=serves,
        costs_of=None if fitted is None else fitted[0],
        costs=costs,
    )
    known = {item.key for item in resolved.no_effect}
    return replace(resolved, no_effect=(*resolved.no_effect, *(item for item in found if item.key not in known)))


def _resolved(loaded: Loaded, *, live: bool) -> Resolved:
    """A live run's ranks are laid out as live: several do not train together."""
    folder = model_folder(loaded, whole=False)
    resolved = resolve(loaded, command="sim", model_folder=folder)
    no_effect = tuple(item for item in resolved.no_effect if item.key not in SERVED)
    if live:
        resolved = resolve(loaded, command="train", model_folder=folder)
    return replace(resolved, no_effect=no_effect)


def _workload(
    resolved: Resolved, train: Mapping[int, Group], held_out: Mapping[int, Group], where: str, score_s: float
) -> TracedWorkload:
    rollout = resolved.config.rollout
    return TracedWorkload(
        train,
        held_out,
        where=where,
        max_turns=rollout.max_turns,
        max_context_tokens=rollout.max_context_tokens,
        max_new_tokens_per_turn=rollout.max_new_tokens_per_turn,
        score_s=score_s,
    )


def _replay_file(
    path: Path,
    overrides: Sequence[str],
    config: str | Path | None,
    calibrated_by: str | None,
    save: str | None,
    started: float,
    progress: Say | None,
) -> Result:
    trace = read_trace(path)
    if config is None:
        loaded = load_config(path, [*_budgets(trace), *overrides], text="")
    else:
        loaded = load_config(config, overrides)
    resolved = _resolved(loaded, live=False)
    groups = groups_of_file(trace, resolved.settings.group_size)
    workload = _workload(resolved, groups, {}, str(path), 0.0)
    world = simulated_world(resolved, recorded=workload)
    calibration = costs = None
    if calibrated_by is not None:
        source = recorded(calibrated_by)
        fitted = calibrated(source)
        world = replace(world, cost=fitted.applied(world.cost))
        costs, calibration = (source.where, fitted), calibration_figures(fitted, source.where)
    resolved = _ignoring(resolved, overrides, workload, str(path), False, costs)

    def told(run: Played) -> Result:
        figures = {
            **_compared(run.metrics, None),
            "recycled_groups": workload.recycled(row.prompt_id for row in run.replay.prompts),
            "calibration": calibration,
        }
        return run.result(started, figures)

    return kept(resolved, world, save, told, progress)


def _budgets(trace: Sequence[TracedTrajectory]) -> list[str]:
    """Overrides of the defaults that hold every trajectory of the file."""
    sampled = max(turn.sampled_tokens for one in trace for turn in one.turns)
    longest = max(one.first_tokens + sum(t.sampled_tokens + t.observed_tokens + 2 for t in one.turns) for one in trace)
    context = max(longest, sampled + 1)
    return [
        f"rollout.max_turns={max(len(one.turns) for one in trace)}",
        f"rollout.max_new_tokens_per_turn={max(1, sampled)}",
        f"rollout.max_context_tokens={context}",
        f"train.micro_batch_tokens={max(Config().train.micro_batch_tokens, context)}",
    ]


def step_s(metrics: RunMetrics) -> float | None:
    """Mean seconds from commit to commit; of a single update, from the first issued task."""
    first, last = metrics.first_commit, metrics.last_commit
    if first is None or last is None:
        return None
    if last.update > first.update:
        return (last.t_s - first.t_s) / (last.update - first.update)
    return metrics.consuming_s


def _compared(predicted: RunMetrics, measured: RunMetrics | None) -> dict[str, Any]:
    """`predicted_…`, `measured_…` and their `…error_fraction`: |predicted - measured| / measured; 1 where only one of
    them is 0, None where nothing was measured."""
    found: dict[str, Any] = {}
    for name in COMPARED:
        mine = _figure(predicted, name)
        theirs = None if measured is None else _figure(measured, name)
        error = None
        if mine is not None and theirs is not None:
            error = abs(mine - theirs) / theirs if theirs else float(mine != 0)
        short = "" if name == "step_s" else f"{name.split('_')[0]}_"
        found |= {f"predicted_{name}": mine, f"measured_{name}": theirs, f"{short}error_fraction": error}
    return found


def _figure(metrics: RunMetrics, name: str) -> float | None:
    return step_s(metrics) if name == "step_s" else metrics.figures()[name]
