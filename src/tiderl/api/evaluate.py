"""`evaluate`: a model on held-out prompts, played by the runtime of training, without training.

The run of zero updates: the trainer's rank loads the model and publishes version 0, the evaluation of it is all that
follows. Environments, tokens, sampling and faults are therefore those of the evaluations during training. Nothing of
it is kept but the result.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from tiderl.api.live import RunLoop, Signals
from tiderl.api.parts import (
    check_engine,
    environment_names,
    host_specs,
    make_cluster,
    make_environments,
    make_renderer,
    policy,
)
from tiderl.cluster.specs import HostSpec
from tiderl.config.machine import prepare
from tiderl.config.render import flow
from tiderl.config.resolve import Resolved
from tiderl.config.resume import with_ranks
from tiderl.data.errors import ConfigurationError, RunStopped
from tiderl.data.events import Event, Fault
from tiderl.data.settings import EvalSettings, ModelSettings, RunSettings, WarmupSettings
from tiderl.envs.registry import check_form
from tiderl.observe.evaluation import judge, worth_showing
from tiderl.observe.transcripts import transcript
from tiderl.runtime.evaluation import EvalJob
from tiderl.runtime.ports import Ports
from tiderl.runtime.run import Run
from tiderl.store.blobs import MemoryBlobs
from tiderl.store.checkpoints import MemoryCheckpoints
from tiderl.store.memory import MemoryLedger
from tiderl.store.rundir import RunDirectory, find


def evaluate(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    model: str | Path | None = None,
    samples: int = 1,
    show: int = 0,
) -> dict[str, Any]:
    """Figures of `observe.evaluation.judge`, what was evaluated, and the transcripts of `show` episodes.

    `source`: a configuration file, or a run, whose configuration and, without `model`, whose `model/` are taken.
    Raises `ConfigurationError` for whatever the user can mend, `RunStopped` when interrupted.
    """
    started = time.monotonic()
    config, run = _source(source)
    overrides = list(overrides) if run is None else with_ranks(overrides)
    if model is None and run is not None and not _sets_model(overrides):
        model = _model_of(run)
    if model is not None:
        overrides = [*overrides, f"model.path={flow(str(model))}"]
    resolved = prepare(config, overrides, command="eval", needs_weights=True)
    if resolved.model_folder is None:
        raise ConfigurationError(
            "a model from scratch has learnt nothing yet", where=f"{config}", hint="give --model DIR, or a run"
        )
    for env in resolved.config.environments.values():
        check_form(env.name)
    check_engine(resolved)
    log = _Log()
    with tempfile.TemporaryDirectory(prefix="tiderl-eval-") as logs:
        try:
            with asyncio.Runner(loop_factory=RunLoop) as runner:
                job = runner.run(_evaluate(resolved, samples, log, Path(logs)))
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise RunStopped("interrupted; nothing is kept", where=f"eval of {source}") from None
    return {
        "run_dir": None if run is None else str(run.root),
        "model": str(resolved.config.model.path),
        "env": environment_names(resolved),
        "seed": resolved.config.seed,
        "temperature": resolved.config.eval.temperature,
        **judge(job.finished, samples=samples),
        "failed": job.failed,
        "faults": dict(sorted(log.faults.items())),
        "wall_s": time.monotonic() - started,
        # Of a file that was written for training, much has none: said is what was typed here.
        "no_effect": [str(item) for item in resolved.no_effect if resolved.origins.get(item.key) == "-o"],
        "transcripts": [transcript(trajectory) for trajectory in worth_showing(job.finished, show)],
    }


class _Log:
    """A recorder that counts faults."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()

    def emit(self, event: Event) -> None:
        if isinstance(event, Fault):
            self.faults[event.what] += 1


async def _evaluate(resolved: Resolved, samples: int, log: _Log, logs: Path) -> EvalJob:
    done: list[EvalJob] = []
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(Signals())
        environments = make_environments(resolved, logs)
        stack.push_async_callback(environments.close)
        await environments.start()
        renderer = await make_renderer(resolved, environments)
        cluster = make_cluster(resolved, _specs(resolved, policy(resolved, renderer)), logs)
        stack.push_async_callback(cluster.close)
        await cluster.start()
        ports = Ports(
            cluster=cluster,
            environments=environments,
            renderer=renderer,
            ledger=MemoryLedger(),
            blobs=MemoryBlobs(),
            checkpoints=MemoryCheckpoints(),
            recorder=log,
        )
        run = Run(ports, _settings(resolved, samples), resolved.strategy, on_evaluated=done.append)
        signals.ask(run.request_stop)
        await run.run()
    if not done:  # stopped on request
        raise asyncio.CancelledError
    return done[0]


def _specs(resolved: Resolved, model: ModelSettings) -> list[HostSpec]:
    """The hosts of training; the trainer's rank only loads the model, and keeps no reference of it."""
    return [
        spec
        if spec.trainer is None
        else msgspec.structs.replace(spec, trainer=msgspec.structs.replace(spec.trainer, kl_coef=0.0))
        for spec in host_specs(resolved, model)
    ]


def _settings(resolved: Resolved, samples: int) -> RunSettings:
    evaluation = resolved.config.eval
    return msgspec.structs.replace(
        resolved.settings,
        updates=0,
        uses_reference=False,
        warmup=WarmupSettings(demos=0, updates=0, lr=0.0),
        evaluation=EvalSettings(1, evaluation.prompts, evaluation.temperature, samples),
    )


def _source(source: str | Path) -> tuple[Path, RunDirectory | None]:
    """The configuration file, and the run it belongs to."""
    if Path(source).is_file() or Path(source).suffix in (".yaml", ".yml"):
        return Path(source), None
    run = find(source)
    return run.config, run


def _model_of(run: RunDirectory) -> Path:
    if run.is_simulation:
        raise ConfigurationError(
            "this is a saved simulation, which has no model",
            where=f"{run.root}",
            hint="name a folder of one: --model DIR",
        )
    if not run.model.is_dir():
        raise ConfigurationError(
            "the run has no model yet: it is written when the run ends",
            where=f"{run.root}",
            hint=f"take a checkpoint: tiderl export {run.root} --to DIR, then --model DIR",
        )
    return run.model


def _sets_model(overrides: Sequence[str]) -> bool:
    return any(override.partition("=")[0].strip() in ("model", "model.path") for override in overrides)
