"""`simulate`: the runtime's own files on a virtual clock, with simulated ranks, environments and journal."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tiderl.api.result import Fanout, Result, journal_counts, make_result
from tiderl.config.machine import prepare
from tiderl.config.render import render_dry_run
from tiderl.config.resolve import Resolved, wait_profile
from tiderl.config.schema import EnvConfig
from tiderl.cost.catalog import cost_model
from tiderl.data.settings import ModelSettings, WarmupSettings
from tiderl.envs.mixed import MixedEnvironments
from tiderl.envs.registry import check_form, profile
from tiderl.observe.metrics import RunMetrics
from tiderl.runtime.ports import Environments, Ports, Recorder
from tiderl.runtime.run import Run
from tiderl.schedule.mix import weighted_order
from tiderl.sim.cluster import SimCluster
from tiderl.sim.environments import SimEnvironments
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

SIM_VOCABULARY = 1024
"""Size of the scratch model's vocabulary in virtual time, where no environment is asked for its words."""


def simulate(config: str | Path, overrides: Sequence[str] = (), *, save: str | None = None) -> Result:
    """Runs the configuration in virtual time. The same configuration and seed give the same `log_sha256`.

    `save`: a run name or path that keeps events and figures. Raises `ConfigurationError`, `DeadlockError`.
    """
    started = time.monotonic()
    resolved = prepare(config, overrides, command="sim")
    for env in resolved.config.environments.values():
        check_form(env.name)
    directory = None
    if save is not None:
        directory = choose(save, "sim")
        create(directory)
        directory.config.write_text(render_dry_run(resolved), encoding="utf-8")
    kept = SegmentRecorder(directory.events) if directory else None
    log = HashRecorder(kept)
    try:
        result = _run(resolved, log, directory, started)
    finally:
        if kept is not None:
            kept.close()
    if directory is not None:
        directory.summary.write_text(json.dumps(result.to_json(), indent=1), encoding="utf-8")
    return result


def _run(resolved: Resolved, log: HashRecorder, directory: RunDirectory | None, started: float) -> Result:
    metrics = RunMetrics()
    recorder = Fanout([log], metrics, [])
    persisted = Persisted()
    # Start-up and warm start are not in the run's clock, and simulated environments have no expert.
    settings = msgspec.structs.replace(resolved.settings, warmup=WarmupSettings(demos=0, updates=0, lr=0.0))
    run = Run(build_ports(resolved, persisted, recorder), settings, resolved.strategy)
    cpu = time.thread_time()
    run_virtual(run.run)
    cpu = time.thread_time() - cpu
    gc.collect()
    return make_result(
        metrics,
        journal_counts(run_virtual(persisted.ledger.replay)),
        resolved.no_effect,
        run_dir=str(directory.root) if directory else None,
        wall_s=time.monotonic() - started,
        driver_load_fraction=cpu / metrics.clock_s if metrics.clock_s else None,
        events=recorder.events,
        log_sha256=log.sha256,
        meaningless=LEARNING,
    )


@dataclass
class Persisted:
    """What outlives a simulated driver: a new one over the same things resumes the run."""

    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    checkpoints: MemoryCheckpoints = field(default_factory=MemoryCheckpoints)
    saved: dict[str, int] = field(default_factory=dict)


def build_ports(resolved: Resolved, persisted: Persisted, recorder: Recorder) -> Ports:
    """Simulated ports for a resolved configuration."""
    config = resolved.config
    renderer = LengthsRenderer()
    model: ModelSettings = resolved.model_settings(
        vocab_size=SIM_VOCABULARY, pad_id=renderer.pad_id, stop_ids=renderer.stop_ids
    )
    workloads = {name: _workload(resolved, env) for name, env in config.environments.items()}
    parts: dict[str, Environments] = {
        name: SimEnvironments(
            workloads[name], slots=int(env.slots), deadline_s=env.deadline_s, eval_prompts=config.eval.prompts
        )
        for name, env in config.environments.items()
    }
    workload: Workload | WorkloadMixture
    environments: Environments
    if config.is_mixture:
        order = weighted_order(list(resolved.settings.environment_weights.values()))
        workload = WorkloadMixture(list(workloads.values()), order)
        environments = MixedEnvironments(parts, slots=resolved.slots)
    else:
        (workload,), (environments,) = workloads.values(), parts.values()
    return Ports(
        cluster=SimCluster(
            resolved.layout.engine_ranks,
            resolved.layout.actor_ranks,
            cost_model(config.sim.hardware, model),
            workload,
            resolved.engine_settings(model),
            with_reference=resolved.settings.uses_reference,
            saved=persisted.saved,
        ),
        environments=environments,
        renderer=renderer,
        ledger=persisted.ledger,
        blobs=persisted.blobs,
        checkpoints=persisted.checkpoints,
        recorder=recorder,
    )


def _workload(resolved: Resolved, env: EnvConfig) -> Workload:
    config = resolved.config
    seed = config.sim.workload_seed
    return Workload(
        config.seed if seed == "auto" else seed,
        profile(env.name),
        max_turns=config.rollout.max_turns,
        max_context_tokens=config.rollout.max_context_tokens,
        max_new_tokens_per_turn=config.rollout.max_new_tokens_per_turn,
        wait=wait_profile(env),
    )
