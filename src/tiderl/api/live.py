"""`train`: a run on real time: its directory, its processes, its signals, its result.

The run directory exists, locked, before anything slow starts. What fails before the run begins leaves no directory.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tiderl.api.live_bound import with_bound
from tiderl.api.parts import (
    check_engine,
    check_trainable,
    environment_names,
    host_specs,
    is_inline,
    make_cluster,
    make_environments,
    make_renderer,
    policy,
)
from tiderl.api.profile import IdleSelector, RunProfile, profiled_tasks
from tiderl.api.records import load_run, read_policy
from tiderl.api.result import Fanout, Result, journal_counts, make_result
from tiderl.config.load import dump
from tiderl.config.machine import prepare
from tiderl.config.render import render_dry_run
from tiderl.config.resolve import Resolved
from tiderl.config.resume import refuse_edits, resume_overrides
from tiderl.data import spans
from tiderl.data.errors import CheckpointError, ConfigurationError, RunStopped, TideError
from tiderl.data.events import EvalFinished, Event, UpdateCommitted, VersionPublished
from tiderl.data.settings import ModelSettings
from tiderl.envs.registry import check_form
from tiderl.observe.curves import write_curves
from tiderl.observe.metrics import RunMetrics
from tiderl.observe.metrics_file import MetricsFile
from tiderl.observe.trackers import TensorboardTracker, check_trackers
from tiderl.runtime.ports import Ports
from tiderl.runtime.run import Run
from tiderl.store.blobs import FileBlobs
from tiderl.store.checkpoints import FileCheckpoints
from tiderl.store.lock import RunLock
from tiderl.store.models import FileModels
from tiderl.store.recorder import SegmentRecorder, read_events
from tiderl.store.rundir import RunDirectory, choose, clear, create, find, write_whole
from tiderl.store.sqlite import SqliteLedger, read_journal
from tiderl.trainers.export import WeightsFolder


class Observer(Protocol):
    """Sees every event of a run, in order, on the run's own thread: it must return at once."""

    def observe(self, event: Event) -> None: ...
    def recall(self, event: Event) -> None:
        """An event of an earlier driver of a resumed run: to be counted, not shown."""

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
    resolved = prepare(config, overrides, command="train", needs_weights=True)
    for env in resolved.config.environments.values():
        check_form(env.name)
    check_trackers(resolved.config.log.trackers)
    check_engine(resolved)
    directory = choose(resolved.config.run, Path(config).stem)
    replaced = _set_aside(directory) if overwrite and directory.is_run else None
    create(directory)  # refuses what is there: nothing of it may be deleted below
    driver = Driver(resolved, directory, observer, started)
    try:
        with RunLock(directory.root):
            _write_config(directory, resolved)
            return driver.run()
    finally:
        if not driver.began:
            shutil.rmtree(directory.root, ignore_errors=True)
        if replaced is not None:
            _settle(replaced, directory, began=driver.began)


def _set_aside(directory: RunDirectory) -> Path:
    """Moves a run that is to be overwritten out of the way, until the new one has begun. Raises `RunLockedError` when
    another driver works on it."""
    with RunLock(directory.root):
        aside = directory.root.with_name(f".{directory.root.name}.replaced")
        shutil.rmtree(aside, ignore_errors=True)
        directory.root.rename(aside)
    return aside


def _settle(replaced: Path, directory: RunDirectory, *, began: bool) -> None:
    """The old run goes when the new one has begun, and comes back when it has not."""
    if began:
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        replaced.rename(directory.root)


def resume(run: str | Path, overrides: Sequence[str] = (), *, observer: Observer | None = None) -> Result:
    """Goes on with a run where its journal ends; a finished one gives its result again, one that never got as far as a
    checkpoint starts again.

    Raises `ConfigurationError` when there is no such run or `overrides` change what a run may not change,
    `RunLockedError` while another driver works on it, `CheckpointError` when nothing of it can be read.
    """
    started = time.monotonic()
    directory = find(run)
    if directory.is_simulation:
        raise ConfigurationError(
            "this is a saved simulation, of which nothing can be gone on with",
            where=str(directory.root),
            hint=f"train its configuration: tiderl train {directory.config}",
        )
    resolved = prepare(directory.config, resume_overrides(overrides), command="train", needs_weights=True)
    check_trackers(resolved.config.log.trackers)
    check_engine(resolved)
    with RunLock(directory.root):
        _refuse_edits(directory, resolved)
        replay = read_journal(directory.journal)
        done = 0 if replay is None else len(replay.updates)
        if done > resolved.settings.updates:
            raise ConfigurationError(
                f"train.updates: {resolved.settings.updates} is less than the {done} that the run has made",
                where=str(directory.root),
                hint="leave it out, or give more to make the run longer",
            )
        if done == resolved.settings.updates:
            finished = _summary_of_finished(directory)
            if finished is not None:
                return Result(finished)
        if replay is None or not replay.checkpoints:
            clear(directory)
        directory.summary.unlink(missing_ok=True)  # of a driver that was stopped
        _write_config(directory, resolved)
        driver = Driver(resolved, directory, observer, started, began=True, resumed=True)
        return driver.run()


def _write_config(directory: RunDirectory, resolved: Resolved) -> None:
    write_whole(directory.config_lock, json.dumps(dump(resolved.config), indent=1))
    write_whole(directory.config, render_dry_run(resolved))


def _refuse_edits(directory: RunDirectory, resolved: Resolved) -> None:
    try:
        accepted = json.loads(directory.config_lock.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # nothing to compare with
    refuse_edits(accepted, json.loads(json.dumps(dump(resolved.config))), where=str(directory.config))


def _summary_of_finished(directory: RunDirectory) -> dict[str, Any] | None:
    """The result of a run that reached its end, with the place where it lies now."""
    try:
        summary = load_run(directory.root).summary
    except CheckpointError:
        return None  # it died after its last update and before its result
    return {**summary, "run_dir": str(directory.root)} if summary.get("outcome") == "done" else None


class RunLoop(asyncio.SelectorEventLoop):
    """The real clock, counted from the start of the run; a resumed run goes on where its events end."""

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        self._origin_s = time.monotonic()
        super().__init__(selector)

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
    """True from the moment at which everything has started: the directory then stays, and a resume goes on."""
    resumed: bool = False
    published: bool = False
    """True once a version is published, and so a checkpoint durable: there is work to keep."""

    def observe(self, event: Event) -> None:
        self.published = self.published or isinstance(event, VersionPublished)

    def run(self) -> Result:
        self._say(f"writing to {self.directory.root}")
        for item in (*self.resolved.remarks, *self.resolved.no_effect):
            self._say(str(item))
        metrics = RunMetrics()
        last_s = self._replay_events(metrics)
        cpu = time.thread_time()
        self.directory.profile.unlink(missing_ok=True)  # of an earlier driver
        try:
            with self._profiling(), asyncio.Runner(loop_factory=self._make_loop) as runner:
                result: Result = runner.run(self._main(metrics, cpu, last_s))
        except (KeyboardInterrupt, asyncio.CancelledError):
            kept = "; what was committed is kept" if self.began else " before the run began; nothing is kept"
            hint = f"go on with: tiderl train --resume {self.directory.root}" if self.began else ""
            raise RunStopped(f"interrupted{kept}", where=str(self.directory.root), hint=hint) from None
        except TideError:
            self.began = self.began and (self.published or self.resumed)
            if self.began:
                self._say(f"what was committed is kept; go on with: tiderl train --resume {self.directory.root}")
            raise
        result = with_bound(result, self.resolved, self.directory)
        write_whole(self.directory.summary, json.dumps(result.to_json(), indent=1))
        self._draw_curves()
        return result

    @contextmanager
    def _profiling(self) -> Iterator[None]:
        """Counts where this process's time goes, with `log.profile`."""
        if not self.resolved.config.log.profile:
            yield
            return
        spans.start("event loop")
        try:
            yield
        finally:
            spans.stop()

    def _make_loop(self) -> RunLoop:
        if not self.resolved.config.log.profile:
            return RunLoop()
        loop = RunLoop(IdleSelector())
        loop.set_task_factory(profiled_tasks())
        return loop

    def _draw_curves(self) -> None:
        """The picture is for people: a run does not fail for it."""
        try:
            drawn = write_curves(self.directory.metrics, self.directory.curves, title=self.directory.root.name)
        except OSError as error:
            self._say(f"no picture of the curves: {error.strerror}")
        else:
            if drawn:
                self._say(f"reward and held-out success are drawn in {self.directory.curves}")

    def _say(self, text: str) -> None:
        if self.observer is not None:
            self.observer.note(text)

    def _keep_policy(self, model: ModelSettings) -> None:
        """Writes what `export` needs beside a checkpoint. Raises `ConfigurationError` where a resumed run's environment
        no longer has the vocabulary that the model was trained on."""
        kept = read_policy(self.directory)
        if kept is not None and kept.words != model.words:
            raise ConfigurationError(
                "the environment's vocabulary is not the one that the run was started with",
                where=f"env.name {environment_names(self.resolved)}",
                hint="resume with that environment, or start a new run",
            )
        write_whole(self.directory.policy, msgspec.json.format(msgspec.json.encode(model)).decode())

    def _replay_events(self, metrics: RunMetrics) -> float:
        last_s = 0.0
        for event in read_events(self.directory.events):
            metrics.observe(event)
            if self.observer is not None:
                self.observer.recall(event)
            last_s = event.t_s
        return last_s

    async def _main(self, metrics: RunMetrics, cpu_s: float, last_s: float) -> Result:
        config = self.resolved.config
        inline, profile = is_inline(self.resolved), config.log.profile
        loop = asyncio.get_running_loop()
        assert isinstance(loop, RunLoop)
        async with AsyncExitStack() as stack:
            signals = stack.enter_context(Signals())
            environments = make_environments(self.resolved, self.directory.logs, profile=profile and not inline)
            stack.push_async_callback(environments.close)
            await environments.start()
            renderer = await make_renderer(self.resolved, environments, say=self._say)
            model = policy(self.resolved, renderer)
            self._keep_policy(model)
            weights_dir = ""
            if not inline:
                folder = WeightsFolder(4 * self.resolved.shape.parameters)
                stack.callback(folder.close)
                weights_dir = str(folder.path)  # published versions outlive a rank that is restarted
            specs = host_specs(self.resolved, model, weights_dir=weights_dir, profile=profile and not inline)
            cluster = make_cluster(self.resolved, specs, self.directory.logs)
            stack.push_async_callback(cluster.close)
            await cluster.start()
            check_trainable(cluster)
            ledger = SqliteLedger(self.directory.journal, threaded=not inline)
            stack.push_async_callback(ledger.close)
            metrics_file = MetricsFile(self.directory.metrics, metrics)
            stack.callback(metrics_file.close)
            segments = SegmentRecorder(self.directory.events, flush_after=(UpdateCommitted, EvalFinished))
            stack.callback(segments.close)
            observers: list[Any] = [metrics_file, *([self.observer] if self.observer is not None else [])]
            if "tensorboard" in config.log.trackers:
                tracker = TensorboardTracker(self.directory.tensorboard, metrics)
                stack.callback(tracker.close)
                observers.append(tracker)
            if profile:
                run_profile = RunProfile(self.directory.profile, [cluster, environments], self._say)
                await stack.enter_async_context(run_profile)
                observers.append(run_profile)
            models = FileModels(self.directory.best_model, self.directory.candidates)
            stack.callback(models.close)
            recorder = Fanout([segments], metrics, [*observers, self])
            ports = Ports(
                cluster=cluster,
                environments=environments,
                renderer=renderer,
                ledger=ledger,
                blobs=FileBlobs(self.directory.blobs, threaded=not inline),
                checkpoints=FileCheckpoints(self.directory.checkpoints),
                recorder=recorder,
                models=models,
            )
            run = Run(ports, self.resolved.settings, self.resolved.strategy, reported_updates=metrics.updates)
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
