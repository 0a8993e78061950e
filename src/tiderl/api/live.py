"""`train`: a run on real time: its directory, its processes, its signals, its result.

The run directory exists, locked, before anything slow starts. What fails before the run begins leaves no directory.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tiderl.api.records import load_run
from tiderl.api.result import Fanout, Result, journal_counts, make_result
from tiderl.cluster.inline import InlineCluster
from tiderl.cluster.process import ProcessCluster
from tiderl.cluster.specs import HostSpec
from tiderl.config.check import check_first_observation
from tiderl.config.machine import prepare
from tiderl.config.render import render_dry_run
from tiderl.config.resolve import Resolved
from tiderl.config.resume import resume_overrides
from tiderl.data.errors import ConfigurationError, RunStopped, TideError
from tiderl.data.events import Event
from tiderl.data.records import TaskKey
from tiderl.data.settings import ModelSettings
from tiderl.envs.pool import build_environments
from tiderl.envs.registry import check_form
from tiderl.observe.metrics import RunMetrics
from tiderl.observe.metrics_file import MetricsFile
from tiderl.runtime.ports import Cluster, Environments, Ports
from tiderl.runtime.run import Run
from tiderl.store.blobs import FileBlobs
from tiderl.store.checkpoints import FileCheckpoints
from tiderl.store.lock import RunLock
from tiderl.store.recorder import SegmentRecorder, read_events
from tiderl.store.rundir import RunDirectory, choose, clear, create, find
from tiderl.store.sqlite import SqliteLedger, read_journal
from tiderl.text.words import WordsRenderer


class Observer(Protocol):
    """Sees every event of a run, in order, on the run's own thread: it must return at once."""

    def observe(self, event: Event) -> None: ...
    def note(self, text: str) -> None:
        """A line for people: where the run is written, which option has no effect."""


def train(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    overwrite: bool = False,
    observer: Observer | None = None,
) -> Result:
    """Trains by the configuration file, `overrides` being `key=value` texts, and returns the result.

    Raises `ConfigurationError` for whatever the user can mend, `RunStopped` when interrupted before the first update,
    other `TideError`s for a run that failed.
    """
    started = time.monotonic()
    resolved = prepare(config, overrides, command="train")
    check_form(resolved.config.env.name)
    directory = choose(resolved.config.run, Path(config).stem)
    create(directory, overwrite=overwrite)
    with RunLock(directory.root):
        directory.config.write_text(render_dry_run(resolved), encoding="utf-8")
        driver = Driver(resolved, directory, observer, started)
        try:
            return driver.run()
        except BaseException:
            if not driver.began:
                shutil.rmtree(directory.root, ignore_errors=True)
            raise


def resume(run: str | Path, overrides: Sequence[str] = (), *, observer: Observer | None = None) -> Result:
    """Goes on with a run where its journal ends; a finished one gives its result again, one that never got as far as a
    checkpoint starts again.

    Raises `ConfigurationError` when there is no such run or `overrides` change what a run may not change,
    `RunLockedError` while another driver works on it, `CheckpointError` when nothing of it can be read.
    """
    started = time.monotonic()
    directory = find(run)
    resolved = prepare(directory.config, resume_overrides(overrides), command="train")
    with RunLock(directory.root):
        replay = read_journal(directory.journal)
        if replay is not None and len(replay.updates) >= resolved.settings.updates and directory.summary.is_file():
            return Result(load_run(directory.root).summary)
        if replay is None or not replay.checkpoints:
            clear(directory)
        else:
            FileCheckpoints(directory.checkpoints).remove_leftovers([row.checkpoint for row in replay.checkpoints])
        if overrides:
            directory.config.write_text(render_dry_run(resolved), encoding="utf-8")
        driver = Driver(resolved, directory, observer, started, began=True)
        return driver.run()


class RunLoop(asyncio.SelectorEventLoop):
    """The real clock, counted from the start of the run; a resumed run goes on where its events end."""

    def __init__(self) -> None:
        self._origin_s = time.monotonic()
        super().__init__()

    def time(self) -> float:
        return time.monotonic() - self._origin_s

    def set_time(self, now_s: float) -> None:
        """From now on the clock shows this. For a moment at which no timer is set."""
        self._origin_s = time.monotonic() - now_s


@dataclass
class Driver:
    """One driver process of one run."""

    resolved: Resolved
    directory: RunDirectory
    observer: Observer | None
    started_s: float
    began: bool = False
    """True from the moment at which the run holds something worth keeping."""

    def run(self) -> Result:
        self._say(f"writing to {self.directory.root}")
        for item in self.resolved.no_effect:
            self._say(str(item))
        metrics = RunMetrics()
        last_s = self._replay_events(metrics)
        loop = RunLoop()
        cpu = time.thread_time()
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                result: Result = runner.run(self._main(metrics, cpu, last_s))
        except (KeyboardInterrupt, asyncio.CancelledError):
            kept = "; what was committed is kept" if self.began else " before the run began; nothing is kept"
            raise RunStopped(f"interrupted{kept}", where=str(self.directory.root)) from None
        self.directory.summary.write_text(json.dumps(result.to_json(), indent=1), encoding="utf-8")
        return result

    def _say(self, text: str) -> None:
        if self.observer is not None:
            self.observer.note(text)

    def _replay_events(self, metrics: RunMetrics) -> float:
        last_s = 0.0
        for event in read_events(self.directory.events):
            metrics.observe(event)
            last_s = event.t_s
        return last_s

    async def _main(self, metrics: RunMetrics, cpu_s: float, last_s: float) -> Result:
        config = self.resolved.config
        inline = config.cluster.kind == "inline"
        loop = asyncio.get_running_loop()
        assert isinstance(loop, RunLoop)
        async with AsyncExitStack() as stack:
            signals = stack.enter_context(Signals())
            environments = self._environments(inline)
            stack.push_async_callback(environments.close)
            await environments.start()
            renderer = await self._renderer(environments)
            cluster = self._cluster(inline, renderer)
            stack.push_async_callback(cluster.close)
            await cluster.start()
            ledger = SqliteLedger(self.directory.journal, threaded=not inline)
            stack.push_async_callback(ledger.close)
            metrics_file = MetricsFile(self.directory.metrics, metrics)
            stack.callback(metrics_file.close)
            segments = SegmentRecorder(self.directory.events)
            stack.callback(segments.close)
            recorder = Fanout([segments], metrics, [o for o in (metrics_file, self.observer) if o is not None])
            ports = Ports(
                cluster=cluster,
                environments=environments,
                renderer=renderer,
                ledger=ledger,
                blobs=FileBlobs(self.directory.blobs, threaded=not inline),
                checkpoints=FileCheckpoints(self.directory.checkpoints),
                recorder=recorder,
            )
            run = Run(ports, self.resolved.settings, self.resolved.strategy)
            self.began = True
            signals.ask(run.request_stop)
            if last_s:
                loop.set_time(last_s)  # starting again is start-up: not in the run's clock
            outcome = await run.run()
            if outcome.updates > 0:
                await cluster.update.save_model(str(self.directory.model.absolute()))
            counts = journal_counts(await ledger.replay())
            seconds = time.monotonic() - self.started_s
            return make_result(
                metrics,
                counts,
                self.resolved.no_effect,
                run_dir=str(self.directory.root),
                wall_s=time.monotonic() - self.started_s,
                driver_load_fraction=None if inline else (time.thread_time() - cpu_s) / seconds,
                events=recorder.events,
                log_sha256=None,
            )

    def _environments(self, inline: bool) -> Environments:
        env = self.resolved.config.env
        # `inline` is one process for everything: worker processes would make the order of arrival a matter of chance.
        isolation = "async" if inline and env.isolation == "pool" else env.isolation
        return build_environments(
            isolation,
            env.name,
            env.options,
            workers=env.workers,
            slots=self.resolved.slots,
            deadline_s=env.deadline_s,
            wait=self.resolved.wait_profile(),
            seed=self.resolved.config.seed,
            log_dir=str(self.directory.logs),
        )

    async def _renderer(self, environments: Environments) -> WordsRenderer:
        vocabulary = await environments.vocabulary()
        if not vocabulary:
            raise ConfigurationError(
                "the words tokenizer needs an environment that declares its vocabulary",
                where=f"env.name {self.resolved.config.env.name}",
                hint="give the class a `vocabulary` method that returns all words of its observations and actions",
            )
        renderer = WordsRenderer.from_vocabulary(vocabulary)
        await _check_first_observation(self.resolved, environments, renderer)
        return renderer

    def _cluster(self, inline: bool, renderer: WordsRenderer) -> Cluster:
        specs = host_specs(self.resolved, renderer)
        if inline:
            return InlineCluster(specs, report=_report)
        return ProcessCluster(specs, self.directory.logs, report=_report)


def host_specs(resolved: Resolved, renderer: WordsRenderer) -> list[HostSpec]:
    """What each rank holds, by the layout of the strategy."""
    model: ModelSettings = resolved.model_settings(
        vocab_size=renderer.vocab_size, pad_id=renderer.pad_id, stop_ids=renderer.stop_ids, words=renderer.words
    )
    layout = resolved.layout
    engines = {rank for ranks in layout.engine_ranks.values() for rank in ranks}
    return [
        HostSpec(
            rank=rank,
            engine=resolved.engine_settings(model) if rank in engines else None,
            trainer=resolved.trainer_settings(model) if rank in layout.actor_ranks else None,
        )
        for rank in range(resolved.config.cluster.ranks)
    ]


async def _check_first_observation(resolved: Resolved, environments: Environments, renderer: WordsRenderer) -> None:
    """Resets one environment: its first observation must fit, and it must work at all, before anything else starts."""
    prompts = await environments.prompts("train")
    if not prompts:
        raise ConfigurationError(
            "the environment has no training prompts", where=f"env.name {resolved.config.env.name}"
        )
    handle = await environments.open(TaskKey("warmup", 0, 0), prompts[0])
    try:
        observation = await handle.reset()
    except TideError as error:
        raise ConfigurationError(
            f"the first reset failed: {error.what}",
            where=f"env.name {resolved.config.env.name}",
            hint=f"try it alone: tiderl env check {resolved.config.env.name}",
        ) from error
    finally:
        await handle.close()
    check_first_observation(resolved.loaded, len(renderer.begin(observation)))


class Signals:
    """Ctrl-C and SIGTERM: the first asks the run to stop, the second, or one before the run, ends it at once."""

    def __init__(self) -> None:
        self._main = asyncio.current_task()
        self._ask: Callable[[], None] | None = None
        self._caught: list[int] = []

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError, RuntimeError):  # signals reach the main thread only
                asyncio.get_running_loop().add_signal_handler(number, self._signalled)
                self._caught.append(number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._caught:
            asyncio.get_running_loop().remove_signal_handler(number)

    def ask(self, stop: Callable[[], None]) -> None:
        """From now on the first signal calls `stop`."""
        self._ask = stop

    def _signalled(self) -> None:
        ask, self._ask = self._ask, None
        if ask is not None:
            ask()
        elif self._main is not None:
            self._main.cancel()


def _report(line: str) -> None:
    print(f"tiderl: {line}", file=sys.stderr)
