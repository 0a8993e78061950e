"""What staleness costs in learning: the quick start without waits under several schedules and seeds.

    python bench/learning.py [--seeds 0 1 2] [--json]     about 3 minutes a run on two idle cores, 15 runs
    python bench/learning.py --short                      what CI runs: three updates of each schedule

Workload: examples/babyai.yaml, evaluated on 400 held-out levels before the first and after the last update. Compared is
the mean success at the end over the seeds; the bar is 0.03 below `sync`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

from overlap import ARMS

from tiderl.api import train

EXAMPLE = Path(__file__).parents[1] / "examples" / "babyai.yaml"
HELD_OUT = 400
LARGEST_LOSS = 0.03
SHORT = ("train.updates=3", "eval.every_updates=3", "eval.prompts=20", "warmup.updates=5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    seeds = arguments.seeds[:1] if arguments.short else arguments.seeds
    extra = SHORT if arguments.short else (f"eval.prompts={HELD_OUT}", "eval.every_updates=1000")
    found: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, chdir(folder):
        for seed in seeds:
            for arm in ARMS:
                run = Path.cwd() / f"{arm.name.replace(' ', '-')}-{seed}"
                result = train(EXAMPLE, [f"seed={seed}", *arm.overrides, *extra, f"run={run}"]).to_json()
                found[arm.name].append(result)
                print(f"seed {seed}  {arm.name:14} {result['eval_success_last']:.3f}", file=sys.stderr, flush=True)
    sync = statistics.mean(result["eval_success_last"] for result in found["sync"])
    shown = {
        name: {
            "success_first": [result["eval_success_first"] for result in results],
            "success_last": [result["eval_success_last"] for result in results],
            "mean": round(mean := statistics.mean(result["eval_success_last"] for result in results), 4),
            "below_sync": round(sync - mean, 4),
            "within_bar": sync - mean <= LARGEST_LOSS,
            "staleness_mean_tokens": [round(result["staleness_mean_tokens"], 3) for result in results],
            "staleness_max": max(result["staleness_max"] for result in results),
            "window_staleness_max": max(result["window_staleness_max"] for result in results),
        }
        for name, results in found.items()
    }
    if arguments.json:
        print(json.dumps(shown, indent=1))
        return
    for name, row in shown.items():
        print(f"{name:14} {row['mean']:.3f}  {row['below_sync']:+.3f} below sync  {row['success_last']}")


if __name__ == "__main__":
    main()
