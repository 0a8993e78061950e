"""`simulate`: the runtime's own files on a virtual clock, with simulated ranks, environments and journal."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from tiderl.api.bound import bound_figures, consumed_bound
from tiderl.api.result import Fanout, Result, journal_counts, make_result
from tiderl.config.machine import prepare
from tiderl.config.render import render_dry_run
from tiderl.config.resolve import Resolved, wait_profile
from tiderl.config.schema import EnvConfig
from tiderl.cost.catalog import THIS_CPU, cost_model
from tiderl.cost.model import CostModel
from tiderl.data.errors import RunStopped
from tiderl.data.records import TaskKey
from tiderl.data.settings import EngineSettings, ModelSettings, WorkloadProfile
from tiderl.envs.mixed import MixedEnvironments
from tiderl.envs.registry import check_form, profile
from tiderl.observe.metrics import RunMetrics
from tiderl.observe.virtual import VirtualProgress, stopped
from tiderl.runtime.ports import Environments, Ports, Recorder, Replay
from tiderl.runtime.rollout import DROPPED_BATCHES_IN_A_ROW
from tiderl.schedule.mix import weighted_order
from tiderl.sim.behaviour import Behaviour
from tiderl.sim.cluster import SimCluster
from tiderl.sim.engine import Talk
from tiderl.sim.environments import SimEnvironments
from tiderl.sim.feasibility import check_can_finish, check_faults
from tiderl.sim.loop import run_virtual
from tiderl.sim.mixture import WorkloadMixture
from tiderl.sim.workload import Workload
from tiderl.store.blobs import MemoryBlobs
from tiderl.store.checkpoints import MemoryCheckpoints
from tiderl.store.memory import MemoryLedger
from tiderl.store.recorder import HashRecorder, SegmentRecorder
from tiderl.store.rundir import RunDirectory, choose, create
from tiderl.text.lengths import LengthsRenderer

LEARNING = (
    "eval_success_first",
    "eval_success_last",
    "eval_success_curve",
    "reward_first",
    "reward_last",
    "reward_curve",
    "logprob_gap_mean",
    "evals",
)
"""Figures that virtual time does not have: nothing is learned there, rewards are drawn."""

ACCELERATOR_PREFILL_TOKENS = 8192
"""Context that an accelerator's engine computes in one step beside what decodes: the usual default on large ones."""

EMBEDDED_MIN_SHARED_TOKENS = 16
"""The embedded engine computes shorter prompts for each member anew (`engines/reuse.py`)."""

SIM_VOCABULARY = 1024
"""Size of the scratch model's vocabulary in virtual time, where no environment is asked for its words."""


Say = Callable[[str], None]
"""Takes a line of progress."""


def simulate(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    save: str | None = None,
    calibrated_by: str | None = None,
    progress: Say | None = None,
) -> Result:
    """Runs the configuration in virtual time. The same configuration and seed give the same `log_sha256`.

    `save`: a run name or path that keeps events and figures. `calibrated_by`: a recorded run whose costs count instead
    of those of `sim.hardware`; the result then says what they are. `progress` gets a line every few seconds. Raises
    `ConfigurationError`, `DeadlockError`, `RunStopped` when interrupted.
    """
    started = time.monotonic()
    resolved = prepare(config, overrides, command="sim")
    for env in resolved.config.environments.values():
        check_form(env.name)
    world, extra = simulated_world(resolved), {}
    if calibrated_by is not None:
        from tiderl.api.trace import calibrated, calibration_figures, recorded  # it simulates through here

        fitted = calibrated(recorded(calibrated_by))
        world = replace(world, cost=fitted.applied(world.cost))
        extra = {"calibration": calibration_figures(fitted, calibrated_by)}
    return kept(resolved, world, save, lambda run: run.result(started, extra), progress)


@dataclass(frozen=True)
class Played:
    """A simulation that came to its end."""

    resolved: Resolved
    world: World
    metrics: RunMetrics
    replay: Replay
    cpu_s: float
    events: int
    log_sha256: str
    run_dir: str | None

    def result(self, started: float, extra: Mapping[str, Any]) -> Result:
        """The keys of every result, and `extra`. `started`: `time.monotonic()` when the command began."""
        metrics, world = self.metrics, self.world
        bound = consumed_bound(self.resolved, self.replay, world.workload, world.cost, world.engine)
        result = make_result(
            metrics,
            journal_counts(self.replay),
            self.resolved.no_effect,
            run_dir=self.run_dir,
            wall_s=time.monotonic() - started,
            driver_load_fraction=self.cpu_s / metrics.clock_s if metrics.clock_s else None,
            events=self.events,
            log_sha256=self.log_sha256,
            meaningless=LEARNING,
            bound=bound_figures(bound, metrics.figures()["goodput_tokens_per_s"]),
        )
        return Result({**result.values, **extra})


def kept(
    resolved: Resolved,
    world: World,
    save: str | None,
    told: Callable[[Played], Result],
    progress: Say | None = None,
) -> Result:
    """Plays `world`; with `save`, events, configuration and what is `told` of it are kept under this name."""
    check_finishes(resolved, world)
    directory = None
    if save is not None:
        directory = choose(save, "sim")
        create(directory, simulated=True)
        directory.config.write_text(render_dry_run(resolved), encoding="utf-8")
    segments = SegmentRecorder(directory.events) if directory else None
    try:
        result = told(_played(resolved, world, HashRecorder(segments), directory, progress))
    finally:
        if segments is not None:
            segments.close()
    if directory is not None:
        directory.summary.write_text(json.dumps(result.to_json(), indent=1), encoding="utf-8")
    return result


def _played(
    resolved: Resolved, world: World, log: HashRecorder, directory: RunDirectory | None, progress: Say | None
) -> Played:
    metrics = RunMetrics()
    recorder = Fanout([log], metrics, [] if progress is None else [VirtualProgress(metrics, progress)])
    persisted = Persisted()
    cpu = time.thread_time()
    try:
        _play(resolved, persisted, recorder, world)
    except KeyboardInterrupt:
        what = "nothing is kept" if directory is None else f"its events so far are in {directory.events}"
        raise RunStopped(f"{stopped(metrics)}; {what}") from None
    cpu = time.thread_time() - cpu
    gc.collect()
    return Played(
        resolved,
        world,
        metrics,
        run_virtual(persisted.ledger.replay),
        cpu_s=cpu,
        events=recorder.events,
        log_sha256=log.sha256,
        run_dir=str(directory.root) if directory else None,
    )


def _play(resolved: Resolved, persisted: Persisted, recorder: Recorder, world: World) -> None:
    from tiderl.api.drivers import VirtualRun, dice_of  # it builds its ports here

    dice = dice_of(resolved)
    run = VirtualRun(resolved, recorder, dice, persisted=persisted, world=world)
    run_virtual(run.to_its_end, reorder=dice.reorder if dice is not None and dice.enabled("reorder") else None)


def check_finishes(resolved: Resolved, world: World, *, calm: bool = False) -> None:
    """Raises `ConfigurationError` for a workload or faults under which the run can never finish. `calm`: the faults
    end by themselves."""
    config = resolved.config
    deadlines = [(world.workloads[name], env.deadline_s) for name, env in config.environments.items()]

    def place(key: TaskKey) -> tuple[Behaviour, float]:
        own = world.workload.of(key) if isinstance(world.workload, WorkloadMixture) else world.workload
        return own, next(deadline_s for workload, deadline_s in deadlines if workload is own)

    groups = DROPPED_BATCHES_IN_A_ROW * resolved.settings.global_batch_groups
    check_can_finish(place, group_size=resolved.settings.group_size, groups=groups)
    if not calm and not isinstance(config.sim.faults, str):
        check_faults(config.sim.faults)


@dataclass
class Persisted:
    """What outlives a simulated driver: a new one over the same things resumes the run."""

    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    checkpoints: MemoryCheckpoints = field(default_factory=MemoryCheckpoints)
    saved: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class World:
    """What is simulated: the tasks of each environment, what work costs, and the engine."""

    workloads: Mapping[str, Behaviour]
    workload: Behaviour | WorkloadMixture
    """Of all environments together."""
    cost: CostModel
    engine: EngineSettings


def simulated_world(
    resolved: Resolved, *, recorded: Behaviour | None = None, prompts: Mapping[str, float] = MappingProxyType({})
) -> World:
    """From `sim:` and the shape of `model:`. `recorded`: what all environments do, instead of their profiles.
    `prompts`: of which environment the first observation is how many times as long as its profile's. Raises
    `ConfigurationError`."""
    config, renderer = resolved.config, LengthsRenderer()
    model: ModelSettings = resolved.model_settings(
        vocab_size=SIM_VOCABULARY, pad_id=renderer.pad_id, stop_ids=renderer.stop_ids
    )
    cost = cost_model(
        config.sim.hardware,
        model,
        named=config.sim.model,
        constants=config.sim.cost,
        efficiency=config.sim.efficiency,
    )
    workloads: Mapping[str, Behaviour]
    workload: Behaviour | WorkloadMixture
    if recorded is not None:
        workloads, workload = dict.fromkeys(config.environments, recorded), recorded
    elif config.is_mixture:
        workloads = {
            name: _workload(resolved, env, prompts.get(name, 1.0)) for name, env in config.environments.items()
        }
        order = weighted_order(list(resolved.settings.environment_weights.values()))
        workload = WorkloadMixture(list(workloads.values()), order)
    else:
        workloads = {name: _workload(resolved, env) for name, env in config.environments.items()}
        (workload,) = workloads.values()
    return World(workloads, workload, cost, _engine_settings(resolved, model, cost))


def build_ports(
    resolved: Resolved,
    persisted: Persisted,
    recorder: Recorder,
    world: World | None = None,
    *,
    talk: Callable[[Talk], Talk] = lambda talk: talk,
) -> Ports:
    """Simulated ports for a resolved configuration, over `simulated_world` of it. `talk`: around what tasks say."""
    config = resolved.config
    world = simulated_world(resolved) if world is None else world
    parts: dict[str, Environments] = {
        name: SimEnvironments(
            world.workloads[name],
            slots=int(env.slots),
            deadline_s=env.deadline_s,
            eval_prompts=config.eval.prompts,
            workers=_workers(env),
        )
        for name, env in config.environments.items()
    }
    environments: Environments
    if config.is_mixture:
        environments = MixedEnvironments(parts, slots=resolved.slots)
    else:
        (environments,) = parts.values()
    return Ports(
        cluster=SimCluster(
            resolved.layout.engine_ranks,
            resolved.layout.actor_ranks,
            world.cost,
            talk(world.workload),
            world.engine,
            with_reference=resolved.settings.uses_reference,
            saved=persisted.saved,
            weight_sync=config.sim.weight_sync,
        ),
        environments=environments,
        renderer=LengthsRenderer(),
        ledger=persisted.ledger,
        blobs=persisted.blobs,
        checkpoints=persisted.checkpoints,
        recorder=recorder,
    )


def _workers(env: EnvConfig) -> int:
    """Calls that an isolation serves at a time."""
    return {"async": 1, "pool": env.workers, "process": int(env.slots)}[env.isolation]


def _engine_settings(resolved: Resolved, model: ModelSettings, cost: CostModel) -> EngineSettings:
    """Of the embedded engine on a CPU; of an engine with paged KV on an accelerator."""
    config, settings = resolved.config, resolved.engine_settings(model)
    block = config.sim.kv_block_tokens
    if config.sim.hardware == THIS_CPU:
        return msgspec.structs.replace(
            settings, kv_block_tokens=1 if block == "auto" else block, min_shared_tokens=EMBEDDED_MIN_SHARED_TOKENS
        )
    budget = settings.kv_budget_tokens
    if resolved.loaded.config.rollout.kv_budget_tokens == "auto":
        budget = min(budget, cost.kv_capacity_tokens)
    return msgspec.structs.replace(
        settings,
        kv_budget_tokens=budget,
        max_batch=cost.max_batch,
        prefill_tokens_per_step=ACCELERATOR_PREFILL_TOKENS,
        prefill_tokens_beside_decoding=ACCELERATOR_PREFILL_TOKENS,
        kv_block_tokens=settings.kv_block_tokens if block == "auto" else block,
    )


def _workload(resolved: Resolved, env: EnvConfig, prompt: float = 1.0) -> Workload:
    """`prompt`: how many times as long as the profile's the first observation is."""
    config = resolved.config
    seed, behaviour = config.sim.workload_seed, config.sim.workload
    own = profile(env.name) if behaviour == "auto" else WorkloadProfile(**behaviour.model_dump())
    first = msgspec.structs.replace(own, first_observation_tokens=prompt * own.first_observation_tokens)
    return Workload(
        config.seed if seed == "auto" else seed,
        first,
        max_turns=config.rollout.max_turns,
        max_context_tokens=config.rollout.max_context_tokens,
        max_new_tokens_per_turn=config.rollout.max_new_tokens_per_turn,
        wait=wait_profile(env),
        window=resolved.settings.image_window,
    )
