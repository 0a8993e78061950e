"""TideRL beside TRL's GRPOTrainer on one workload (`workload.py`): consumed tokens per second, by environment wait.

    python bench/peers/compare.py --trl-python trl-venv/bin/python       about half an hour on two cores
    python bench/peers/compare.py --waits heavy --repeats 1 --trl-python ...  one wait
    python bench/peers/compare.py --short                                     correctness only, TideRL's arms alone

`trl_grpo.py` says how to make TRL's environment. Every arm starts from the same weights (`environment_factory` cannot:
see there) and runs in processes of its own, all in turn, as often as `--repeats`; medians are shown. The clock of all:
from the first rollout to the last update, start-up outside, no evaluation, no checkpoint between. Prints a table, and
as the last line the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))

import workload

Row = dict[str, Any]

LONGEST_S = 1800.0
"""After which an arm counts as hung."""
UPDATES = {"0": 20, "50ms": 12, "500ms": 6, "heavy": 6}
"""Of one run: the slowest arm takes some minutes."""
TOOL_UPDATES = {"0": 2, "50ms": 2, "500ms": 1, "heavy": 1}
"""Of the arm that waits for one environment after the other: minutes for one update."""
SHORT_UPDATES = 2
FIGURES = ("tokens_per_s", "rollouts_per_s", "update_s", "loss_tokens_per_rollout", "prompt_tokens")
RATIOS = ("tokens_ratio", "rollouts_ratio")


@dataclass(frozen=True)
class Arm:
    """`strategy` and `ranks` for TideRL, `peer` and `threads` for TRL. A rank is one process with one thread."""

    name: str
    strategy: str = ""
    ranks: int = 0
    peer: str = ""
    threads: int = 1


ARMS = (
    Arm("tiderl areal, 2 ranks", strategy="areal", ranks=2),
    Arm("tiderl sync, 2 ranks", strategy="sync", ranks=2),
    Arm("tiderl areal, 1 rank", strategy="areal", ranks=1),
    Arm("trl lockstep, 1 thread", peer="lockstep"),
    Arm("trl lockstep, 2 threads", peer="lockstep", threads=2),
    Arm("trl environment_factory", peer="environment_factory"),
)
BASE = "trl lockstep, 1 thread"
"""What ratios are to."""


class ArmFailed(Exception):
    """An arm did not do its work; the text says which, and its process's last lines."""


def run_tiderl(arm: Arm, wait: str, updates: int, model: Path, folder: Path) -> Row:
    """One `tiderl train` to its end; its figures under the names that `trl_grpo.py` prints."""
    config = workload.configuration(
        wait=wait,
        updates=updates,
        strategy=arm.strategy,
        ranks=arm.ranks,
        model=str(model),
    )
    result = train(config, folder, arm.name)
    row = {
        "updates": result["updates"],
        "loss_tokens": result["trained_loss_tokens"],
        "tokens_per_s": result["goodput_tokens_per_s"],
        "rollouts_per_s": result["consumed_groups_per_s"] * workload.GROUP_SIZE,
        "update_s": workload.GROUPS / result["consumed_groups_per_s"],
        "loss_tokens_per_rollout": result["trained_loss_tokens"] / result["trained"],
        "rollout_tokens": result["trained_tokens_mean"],
        "prompt_tokens": workload.prompt_tokens(updates),
        "reward": statistics.fmean(value for _, value in result["reward_curve"]),
        "staleness_max": result["staleness_max"],
    }
    if result["trained"] != updates * workload.ROLLOUTS or result["dropped"] or result["faults"]:
        raise ArmFailed(f"{arm.name}: {result['trained']} trained, {result['dropped']}, {result['faults']}")
    return row


def train(config: Mapping[str, Any], folder: Path, name: str) -> Row:
    """The result of `tiderl train --json`, which leaves its run in `folder`."""
    path = folder / "peer.yaml"
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
    return last_json([sys.executable, "-m", "tiderl.cli.main", "train", path.name, "--json"], folder, name, threads=1)


def run_peer(arm: Arm, wait: str, updates: int, model: Path, python: Path, folder: Path) -> Row:
    script = Path(__file__).with_name("trl_grpo.py")
    command = [str(python), str(script), "--arm", arm.peer, "--wait", wait, "--updates", str(updates)]
    return last_json(
        [*command, "--model", str(model), "--threads", str(arm.threads)], folder, arm.name, threads=arm.threads
    )


def last_json(command: Sequence[str], folder: Path, name: str, *, threads: int) -> Row:
    """The object that the command prints as its last line. Raises `ArmFailed`."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ArmFailed(f"{name}: {error}") from error
    if done.returncode:
        raise ArmFailed(f"{name} ended with {done.returncode}:\n" + "\n".join(done.stderr.splitlines()[-8:]))
    return json.loads(done.stdout.splitlines()[-1])


def start_model(folder: Path, *, short: bool = False) -> Path:
    """A run of the warm-up and one update that changes nothing to speak of; its saved model is everybody's start.
    `short`: a small model that has learnt nothing yet."""
    config = workload.configuration(wait="0", updates=1, strategy="sync", ranks=1, model=None, cluster="inline")
    config["train"] = {**config["train"], "lr": 1.0e-9}
    if short:
        config["model"] = {**config["model"], "layers": 1, "hidden": 32}
        config["warmup"] = {"demos": 0, "updates": 0}
    result = train(config, folder, "start model")
    return folder / result["run_dir"] / "model"


def measure(
    arms: Sequence[Arm], waits: Mapping[str, int], python: Path | None, model: Path, folder: Path
) -> Iterator[Row]:
    """Every arm once for each wait (name to updates), in turn. Without an interpreter TRL's arms are left out."""
    for wait, updates in waits.items():
        for arm in arms:
            if not arm.peer:
                row = run_tiderl(arm, wait, updates, model, folder)
            elif python is not None:
                count = TOOL_UPDATES[wait] if arm.peer == "environment_factory" else updates
                row = run_peer(arm, wait, count, model, python, folder)
            else:
                continue
            yield {**row, "arm": arm.name, "wait": wait}


def keep(row: Row, path: Path | None) -> None:
    """One line a run, at once: what was measured outlives a later arm that fails."""
    line = json.dumps(row) + "\n"
    sys.stderr.write(line)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)


def medians(rows: Sequence[Row]) -> list[Row]:
    """One row for each wait and arm, in their order: medians, the extremes of `tokens_per_s`, the ratios to `BASE`."""
    measured = {(row["wait"], row["arm"]) for row in rows}
    found = []
    for wait, arm in ((wait, arm.name) for wait in workload.WAITS for arm in ARMS if (wait, arm.name) in measured):
        same = [row for row in rows if (row["wait"], row["arm"]) == (wait, arm)]
        speeds = [row["tokens_per_s"] for row in same]
        middle = {name: statistics.median(row[name] for row in same) for name in FIGURES}
        found.append({"wait": wait, "arm": arm, **middle, "runs": len(same), "least": min(speeds), "most": max(speeds)})
    base = {row["wait"]: row for row in found if row["arm"] == BASE}
    for row in found:
        slow = base.get(row["wait"])
        row["tokens_ratio"] = row["tokens_per_s"] / slow["tokens_per_s"] if slow else None
        row["rollouts_ratio"] = row["rollouts_per_s"] / slow["rollouts_per_s"] if slow else None
    return found


def table(rows: Sequence[Row]) -> str:
    """For people. Loss-bearing and prompt tokens are those of one rollout; the last columns are ratios to `BASE`."""
    lines = [
        "| wait | arm | tokens/s | least … most, runs | rollouts/s | s/update | loss, prompt | × tokens | × rollouts |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        ratios = " | ".join("–" if row[name] is None else f"{row[name]:.2f}" for name in RATIOS)
        lines.append(
            f"| {row['wait']} | {row['arm']} | {row['tokens_per_s']:,.1f} "
            f"| {row['least']:,.1f} … {row['most']:,.1f}, {row['runs']} | {row['rollouts_per_s']:.2f} "
            f"| {row['update_s']:.2f} | {row['loss_tokens_per_rollout']:.1f}, {row['prompt_tokens']:.0f} | {ratios} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, help="TRL's interpreter; without it TRL's arms are left out")
    parser.add_argument("--waits", nargs="+", choices=list(workload.WAITS), default=list(workload.WAITS))
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], default=[arm.name for arm in ARMS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, help="of every run but environment_factory's (default: by wait)")
    parser.add_argument("--short", action="store_true", help="two updates without waits, no measurement")
    parser.add_argument("--model", type=Path, help="the start model's folder; else one is made")
    parser.add_argument("--rows", type=Path, help="file to add every run's figures to; what is shown is of all in it")
    arguments = parser.parse_args()
    if arguments.trl_python is not None:
        arguments.trl_python = arguments.trl_python.absolute()
        if not arguments.trl_python.exists():
            parser.error(f"--trl-python {arguments.trl_python}: there is no such interpreter")
    arms = [arm for arm in ARMS if arm.name in arguments.arms]
    waits = {wait: arguments.updates or UPDATES[wait] for wait in arguments.waits}
    if arguments.short:
        arms, waits, arguments.repeats = [arm for arm in arms if arm.ranks != 1], {"0": SHORT_UPDATES}, 1
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = (
                start_model(folder, short=arguments.short) if arguments.model is None else arguments.model.absolute()
            )
            for repeat in range(arguments.repeats):
                # An update of environment_factory takes minutes: once.
                now = [arm for arm in arms if repeat == 0 or arm.peer != "environment_factory"]
                for row in measure(now, waits, arguments.trl_python, model, folder):
                    rows.append(row)
                    keep(row, arguments.rows)
    except ArmFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    if arguments.rows is not None:
        rows = [json.loads(line) for line in arguments.rows.read_text(encoding="utf-8").splitlines()]
    shown = medians(rows)
    if arguments.trl_python is None and any(arm.peer for arm in arms):
        print("TRL's arms are left out: no --trl-python", file=sys.stderr)
    print(table(shown))
    print(json.dumps(shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
