"""How fast the simulator is: turns per CPU second of one core, everything included, and what a turn costs at scale.

    python bench/sim.py [--short] [--json] [--rounds 5] [--config examples/babyai.yaml]

Every run is the whole of `tiderl sim`: runtime, schedule, simulated ports, event log with its hash, and metrics. CPU
seconds of the process, as medians of rounds that take all rank counts in turn; peak memory is that of a process of its
own with 32 ranks. Tasks in flight grow with the ranks. Limits: 5,000 turns/s and 2 GB at 32 ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from tiderl.api.result import Fanout
from tiderl.api.virtual import Persisted, build_ports
from tiderl.config.machine import prepare
from tiderl.data.events import Event, TurnFinished
from tiderl.data.settings import WarmupSettings
from tiderl.observe.metrics import RunMetrics
from tiderl.runtime.run import Run
from tiderl.sim.loop import run_virtual
from tiderl.store.recorder import HashRecorder

EXAMPLE = Path(__file__).parents[1] / "examples" / "babyai.yaml"
RANKS = (32, 256, 1024, 4096)
SHORT_RANKS = (4, 8)
GROUPS_PER_RANK = 0.5  # of 8 tasks, in each batch; twice as many tasks are in flight
TURNS = 100_000  # about as many in each run, so that start and end weigh alike
TURNS_PER_GROUP = 44  # of the example, for the number of updates only
LIMIT_TURNS_PER_S, LIMIT_BYTES, AIM_GROWTH = 5_000, 2 << 30, 1.5


@dataclass(frozen=True)
class Measured:
    """One run. `turns_per_s`: of CPU time; `driver_load_fraction`: CPU seconds over virtual ones."""

    ranks: int
    tasks: int
    turns: int
    turns_per_s: float
    driver_load_fraction: float
    sha256: str


class TurnCounter:
    def __init__(self) -> None:
        self.turns = 0

    def observe(self, event: Event) -> None:
        self.turns += isinstance(event, TurnFinished)


def measure(config: Path, ranks: int, turns: int) -> Measured:
    """One whole run of about `turns` turns."""
    groups = max(1, round(GROUPS_PER_RANK * ranks))
    updates = max(2, round(turns / (groups * TURNS_PER_GROUP)))
    resolved = prepare(
        config,
        [
            f"cluster.ranks={ranks}",
            f"train.global_batch_groups={groups}",
            f"train.updates={updates}",
            "eval.every_updates=0",
        ],
        command="sim",
    )
    counter, metrics, log = TurnCounter(), RunMetrics(), HashRecorder(None)
    settings = msgspec.structs.replace(resolved.settings, warmup=WarmupSettings(demos=0, updates=0, lr=0.0))
    gc.collect()
    started = time.process_time()
    ports = build_ports(resolved, Persisted(), Fanout([log], metrics, [counter]))
    run_virtual(Run(ports, settings, resolved.strategy).run)
    seconds = time.process_time() - started
    return Measured(
        ranks=ranks,
        tasks=resolved.slots,
        turns=counter.turns,
        turns_per_s=counter.turns / seconds,
        driver_load_fraction=seconds / metrics.clock_s,
        sha256=log.sha256,
    )


def median_of(runs: list[Measured]) -> Measured:
    return msgspec.convert(
        {
            **asdict(runs[0]),
            "turns_per_s": statistics.median(run.turns_per_s for run in runs),
            "driver_load_fraction": statistics.median(run.driver_load_fraction for run in runs),
        },
        Measured,
    )


def peak_bytes(config: Path, ranks: int, turns: int) -> int:
    """Of a process that does one run."""
    command = [sys.executable, __file__, "--alone", str(ranks), "--turns", str(turns), "--config", str(config)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=EXAMPLE)
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--short", action="store_true", help="a small run twice: the same log; no figure is judged")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--alone", type=int, metavar="RANKS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        measure(args.config, args.alone, args.turns)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
        return
    ranks = args.ranks or list(SHORT_RANKS if args.short else RANKS)
    rounds, turns = (2, 1_000) if args.short else (args.rounds, args.turns)
    peak = peak_bytes(args.config, ranks[0], turns)  # first: a child's peak counts from its parent's size
    runs: dict[int, list[Measured]] = {count: [] for count in ranks}
    for _ in range(rounds):
        for count in ranks:
            runs[count].append(measure(args.config, count, turns))
    unequal = [count for count, of_one in runs.items() if len({run.sha256 for run in of_one}) > 1]
    if unequal:
        sys.exit(f"two runs of one seed differ, with {unequal} ranks")
    medians = [median_of(of_one) for of_one in runs.values()]
    growth = [medians[0].turns_per_s / run.turns_per_s for run in medians]
    if args.json:
        rows = [{**asdict(run), "cost_growth": ratio} for run, ratio in zip(medians, growth, strict=True)]
        print(json.dumps({"runs": rows, "peak_bytes": peak}))
        return
    print("ranks   tasks    turns  turns/s  cost of a turn  driver_load_fraction")
    for run, ratio in zip(medians, growth, strict=True):
        print(
            f"{run.ranks:5}  {run.tasks:6}  {run.turns:7}  {run.turns_per_s:7.0f}  {ratio:12.2f} x  "
            f"{run.driver_load_fraction:20.2f}"
        )
    print(f"peak memory with {ranks[0]} ranks: {peak / 1e6:.0f} MB")
    if not args.short:
        print(f"limits: {LIMIT_TURNS_PER_S} turns/s, {LIMIT_BYTES >> 30} GB; aim: {AIM_GROWTH} x")


if __name__ == "__main__":
    main()
