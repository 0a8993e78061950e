"""How well virtual time foretells the quick start: costs fitted to a live `sync` run, against other live runs.

    python bench/prediction.py [--rounds 3] [--updates 16] [--json]       about two minutes a round on two idle cores
    python bench/prediction.py --folder DIR                               reads the runs of an earlier call again

A round trains the same example under `sync`, `areal` and two other batch sizes, one after the other, and replays each
with costs fitted to the round's `sync` run, and once more with costs fitted to itself. Printed are predicted ÷ measured
- 1 of every run, and the medians over rounds. On a machine that others use, runs of one round differ in speed: the
errors under costs of the run itself tell the model's from the machine's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tiderl.api import train
from tiderl.api.trace import replay

EXAMPLE = Path(__file__).parents[1] / "examples" / "babyai.yaml"
COMMON = ("eval.every_updates=0", "warmup.updates=20", "warmup.demos=40")
RUNS = {
    "sync": ("schedule.strategy=sync",),
    "areal": ("schedule.strategy=areal",),
    "sync, batches of 4": ("schedule.strategy=sync", "train.global_batch_groups=4"),
    "sync, batches of 16": ("schedule.strategy=sync", "train.global_batch_groups=16"),
}
FIGURES = {"step": "step_s", "goodput": "goodput_tokens_per_s", "staleness": "staleness_mean_tokens"}
TOLERANCE = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="where the runs are kept")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        rows = [row for number in range(given.rounds) for row in one_round(folder, number, given.updates)]
    medians = median_errors(rows)
    if given.json:
        print(json.dumps({"tolerance": TOLERANCE, "rows": rows, "medians": medians}))
    else:
        print(table(medians))


def one_round(folder: Path, number: int, updates: int) -> list[dict[str, Any]]:
    """Trains what is not in the folder yet, replays all of it."""
    runs = {name: folder / f"{name.replace(', ', '-').replace(' ', '-')}-{number}" for name in RUNS}
    for name, run in runs.items():
        if not run.exists():
            train(EXAMPLE, [*COMMON, f"train.updates={updates}", *RUNS[name], f"run={run}"])
            print(f"round {number}: {name} trained", file=sys.stderr)
    rows = []
    for name, run in runs.items():
        for costs in ("sync", name):
            result = replay(run, calibrated_by=str(runs[costs])).to_json()
            errors = {short: error(result, figure) for short, figure in FIGURES.items()}
            rows.append({"round": number, "run": name, "costs": "itself" if costs == name else costs, **errors})
    return [row for place, row in enumerate(rows) if row not in rows[:place]]


def error(result: dict[str, Any], figure: str) -> float:
    """predicted ÷ measured - 1; 0 where both are 0."""
    predicted, measured = result[f"predicted_{figure}"], result[f"measured_{figure}"]
    return 0.0 if predicted == measured else float(predicted / measured - 1)


def median_errors(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over the rounds of each run under each costs."""
    found = []
    for run, costs in dict.fromkeys((row["run"], row["costs"]) for row in rows):
        own = [row for row in rows if (row["run"], row["costs"]) == (run, costs)]
        found.append(
            {"run": run, "costs": costs} | {name: statistics.median(row[name] for row in own) for name in FIGURES}
        )
    return found


def table(medians: list[dict[str, Any]]) -> str:
    lines = [f"{'run':22}{'costs of':10}" + "".join(f"{name:>12}" for name in FIGURES)]
    for row in medians:
        worst = max(abs(row[name]) for name in FIGURES)
        marks = "" if worst <= TOLERANCE else f"  beyond {TOLERANCE:.0%}"
        lines.append(f"{row['run']:22}{row['costs']:10}" + "".join(f"{row[name]:>+12.1%}" for name in FIGURES) + marks)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
