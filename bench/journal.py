"""What checkpoints, journal and events cost, as a share of a run's time: all taken in the same run, so that a busy
machine moves both sides of the ratio.

    python bench/journal.py [CONFIG] [--updates 30] [--repeats 3]

Runs in a temporary folder under the current one: on its disk. Prints one JSON object. Counted are the whole
wait of the training loop for checkpoints and commits, and the CPU seconds of what only takes a core from somebody:
`append`, payload writes, the journal's writer thread, `emit`. How long the driver's loop stood still for payloads and
events, other processes' turns on its core included, is beside it as `…_wall`. The time is that from the first issued
task to the last commit, as for goodput. Limits: 5 % and 1 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from tiderl.api import live, train
from tiderl.runtime import checkpoints
from tiderl.runtime import run as runtime_run
from tiderl.store import sqlite

EXAMPLE = Path(__file__).parents[1] / "examples" / "babyai.yaml"
KEPT_LIMIT, EVENTS_LIMIT = 0.05, 0.01
KEPT = ("checkpoints", "journal_commit", "journal_append_cpu", "journal_writer_cpu", "payloads_cpu")


Parts = dict[tuple[Any, str], type]


def timed_parts(seconds: Counter[str]) -> Parts:
    """What stands in for the parts that are measured: the same, each with a watch that adds to `seconds`."""

    class Journal(sqlite.Journal):
        def append(self, rows: Any) -> None:
            started = time.thread_time()
            super().append(rows)
            seconds["journal_writer_cpu"] += time.thread_time() - started

    class Ledger(live.SqliteLedger):
        def append(self, rows: Any) -> None:
            started = time.thread_time()
            super().append(rows)
            seconds["journal_append_cpu"] += time.thread_time() - started

        async def commit(self, update: int, trajectory_ids: Any) -> None:
            started = time.perf_counter()
            await super().commit(update, trajectory_ids)
            seconds["journal_commit"] += time.perf_counter() - started

    class Blobs(live.FileBlobs):
        async def put(self, trajectory: Any) -> str:
            started, cpu = time.perf_counter(), time.thread_time()
            sha256 = await super().put(trajectory)
            seconds["payloads_cpu"] += time.thread_time() - cpu
            seconds["payloads_wall"] += time.perf_counter() - started
            return sha256

    class Recorder(live.SegmentRecorder):
        def emit(self, event: Any) -> None:
            started, cpu = time.perf_counter(), time.thread_time()
            super().emit(event)
            seconds["events_cpu"] += time.thread_time() - cpu
            seconds["events_wall"] += time.perf_counter() - started

    class Checkpointer(checkpoints.Checkpointer):
        async def consumed(self, update: int, sha256s: Any) -> None:
            started = time.perf_counter()
            await super().consumed(update, sha256s)
            seconds["checkpoints"] += time.perf_counter() - started

        async def write(self, update: int) -> bool:
            seconds["checkpoints_written"] += update > 0
            return await super().write(update)

    return {
        (sqlite, "Journal"): Journal,
        (live, "SqliteLedger"): Ledger,
        (live, "FileBlobs"): Blobs,
        (live, "SegmentRecorder"): Recorder,
        (runtime_run, "Checkpointer"): Checkpointer,
    }


@contextmanager
def in_place(parts: Parts) -> Iterator[None]:
    kept = {(module, name): getattr(module, name) for module, name in parts}
    try:
        for (module, name), part in parts.items():
            setattr(module, name, part)
        yield
    finally:
        for (module, name), part in kept.items():
            setattr(module, name, part)


def measure(config: Path, updates: int) -> dict[str, float]:
    """One run in a folder of its own: shares of its time, and what they were made of, in seconds."""
    seconds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=".") as folder, chdir(folder), in_place(timed_parts(seconds)):
        result = train(config, ["run=bench", f"train.updates={updates}", "eval.every_updates=0"])
    total = result["trained_loss_tokens"] / result["goodput_tokens_per_s"]
    kept = sum(seconds[name] for name in KEPT)
    return {"kept_fraction": kept / total, "events_fraction": seconds["events_cpu"] / total, "run_s": total, **seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=EXAMPLE)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    runs = [measure(arguments.config.absolute(), arguments.updates) for _ in range(arguments.repeats)]
    median = {name: round(statistics.median(run.get(name, 0.0) for run in runs), 5) for name in sorted(runs[0])}
    within = median["kept_fraction"] < KEPT_LIMIT and median["events_fraction"] < EVENTS_LIMIT
    shares = [[round(run["kept_fraction"], 4), round(run["events_fraction"], 4)] for run in runs]
    print(
        json.dumps(
            {
                "config": arguments.config.name,
                "updates": arguments.updates,
                "within_limits": within,
                "median": median,
                "all_shares": shares,
            }
        )
    )


if __name__ == "__main__":
    main()
