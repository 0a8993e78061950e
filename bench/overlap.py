"""Goodput under heavy-tailed waits: `areal` at several staleness bounds against `sync`, on the same ranks.

    python bench/overlap.py [--repeats 3] [--json]        about 12 minutes a repeat
    python bench/overlap.py --short                       what CI runs: two updates, short waits, correctness only

Workload: bench/overlap.yaml. Every arm of a repeat has the same seed, so the same waits for the same (prompt, member,
turn). Counted are the loss-bearing tokens of updates 6 … 25 over the time between the commits of updates 5 and 25; a
run goes on for some updates more, so that starts never run dry within what is counted.

`ideal` is what the same rules give with ranks that take no time: the recorded turns of each arm and its waits, replayed
with nothing else in them. `gap` = 1 − ideal seconds ÷ measured seconds: what engine, trainer and driver cost beside the
waits. The ratio of ideals is the limit that the staleness bound sets.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiderl.api import train
from tiderl.config.load import load_config
from tiderl.config.resolve import wait_profile
from tiderl.data.events import PromptIssued, TaskFinished, UpdateCommitted
from tiderl.data.records import TaskKey
from tiderl.data.settings import StalenessCounts, WaitProfile
from tiderl.envs.waits import wait_s
from tiderl.schedule.staleness import (
    GroupView,
    ReadyView,
    StartView,
    choose_more,
    choose_oldest_ready,
    choose_whole_batch,
    deadline,
    starts_allowed,
)
from tiderl.store.recorder import read_events

WORKLOAD = Path(__file__).with_suffix(".yaml")
WARM_UPDATES, COUNTED_UPDATES = 5, 20
SHORT = ("env.wait={kind: lognormal, median_s: 0.01, sigma: 1.2}", "warmup.updates=2", "rollout.max_turns=3")
TARGETS = {"areal eta 1": 1.7, "areal eta 2": 2.4, "areal eta 4": 3.8, "window eta 1": 3.0}


@dataclass(frozen=True)
class Arm:
    """One schedule."""

    name: str
    strategy: str
    max_staleness: int
    counts: StalenessCounts = "oldest_token"

    @property
    def overrides(self) -> tuple[str, ...]:
        if self.strategy == "sync":
            return ("schedule.strategy=sync",)
        return (
            f"schedule.strategy={self.strategy}",
            f"schedule.max_staleness={self.max_staleness}",
            f"schedule.staleness_counts={self.counts}",
        )


ARMS = (
    Arm("sync", "sync", 0),
    Arm("areal eta 1", "areal", 1),
    Arm("areal eta 2", "areal", 2),
    Arm("areal eta 4", "areal", 4),
    Arm("window eta 1", "areal", 1, "window"),
)

Turns = Mapping[tuple[int, int], int]  # (prompt id, member) -> turns


def ideal_commits_s(
    arm: Arm, turns: Turns, waits: WaitProfile, *, seed: int, updates: int, batch_groups: int, group_size: int
) -> list[float]:
    """Commit times of the updates on ranks that take no time: only the environments' waits are left.

    A prompt whose turns are not recorded (the run ended before it) is not started; `turns` must hold enough.
    """
    latency_s = {
        (prompt, member): sum(wait_s(waits, seed, TaskKey("train", prompt, member), turn) for turn in range(count))
        for (prompt, member), count in turns.items()
    }
    prompts = {prompt for prompt, _ in turns}
    total = next(number for number in range(len(prompts) + 1) if number not in prompts)
    started, now, commits = 0, 0.0, list[float]()
    live: dict[int, float] = {}  # prompt id -> when its last member is done
    version_of: dict[int, int] = {}
    ready: dict[int, ReadyView] = {}
    taken: list[int] = []
    ends: list[tuple[float, int]] = []

    def start() -> None:
        nonlocal started
        done = len(commits)
        view = StartView(started, total, batch_groups, arm.max_staleness, arm.counts, done)
        for _ in range(starts_allowed(view, version=done)):
            live[started] = now + max(latency_s[started, member] for member in range(group_size))
            version_of[started] = done
            heapq.heappush(ends, (live[started], started))
            started += 1

    def take() -> None:
        done = len(commits)
        views = [GroupView(g, deadline(version_of[g], arm.max_staleness, arm.counts), g in ready) for g in live]
        if arm.strategy == "sync":
            taken.extend(choose_whole_batch(views, batch_groups) or ())
        elif arm.counts == "window":
            taken.extend(choose_oldest_ready(list(ready.values()), taken, batch_groups))
        else:
            taken.extend(choose_more(views, taken, done, batch_groups, arm.max_staleness))

    start()
    while len(commits) < updates and ends:
        now, prompt = heapq.heappop(ends)
        ready[prompt] = ReadyView(len(commits), now, prompt)
        take()
        while len(taken) == batch_groups and len(commits) < updates:
            for prompt in taken:
                del live[prompt], ready[prompt]
            taken.clear()
            commits.append(now)
            start()
            take()
    return commits


@dataclass(frozen=True)
class Measured:
    """One run of one arm. Seconds and tokens of the counted updates."""

    updates: int
    seconds: float
    tokens: int
    ideal_s: float
    staleness_max: int
    window_staleness_max: int

    @property
    def goodput_tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def measure(arm: Arm, *, seed: int, warm: int, counted: int, extra: tuple[str, ...] = ()) -> Measured:
    """Runs the arm in the current folder and reads its events. Raises `TideError`."""
    beyond = arm.max_staleness + 2  # batches that start within what is counted and end after it
    overrides = [f"seed={seed}", f"train.updates={warm + counted + beyond}", *arm.overrides, *extra]
    run = Path.cwd() / f"{arm.name.replace(' ', '-')}-{seed}"
    train(WORKLOAD, [*overrides, f"run={run}"])
    events = list(read_events(run / "events"))
    commits = {event.update: event for event in events if isinstance(event, UpdateCommitted)}
    turns: dict[tuple[int, int], int] = {}
    for event in events:
        if isinstance(event, TaskFinished) and event.split == "train":
            turns[event.prompt_id, event.member] = event.turns
    config = load_config(WORKLOAD, overrides).config
    profile = wait_profile(config.environments[next(iter(config.environments))])
    assert profile is not None
    ideal = ideal_commits_s(
        arm,
        whole_groups(turns, config.algorithm.group_size),
        profile,
        seed=seed,
        updates=warm + counted,
        batch_groups=config.train.global_batch_groups,
        group_size=config.algorithm.group_size,
    )
    window = [commits[update] for update in range(warm + 1, warm + counted + 1)]
    first_s = next(event.t_s for event in events if isinstance(event, PromptIssued))
    since = commits[warm].t_s if warm else first_s
    return Measured(
        updates=counted,
        seconds=window[-1].t_s - since,
        tokens=sum(update.loss_tokens for update in window),
        ideal_s=ideal[warm + counted - 1] - (ideal[warm - 1] if warm else 0.0),
        staleness_max=max(update.staleness_max for update in window),
        window_staleness_max=max(update.window_staleness_max for update in window),
    )


def whole_groups(turns: Turns, group_size: int) -> dict[tuple[int, int], int]:
    """Without the groups of which a member did not finish."""
    members: dict[int, int] = defaultdict(int)
    for prompt, _ in turns:
        members[prompt] += 1
    return {key: count for key, count in turns.items() if members[key[0]] == group_size}


def report(runs: Mapping[str, list[Measured]]) -> dict[str, Any]:
    """Medians over the repeats; ratios are medians of the ratios within a repeat."""
    sync = runs["sync"]

    def ratio(name: str, values: Any) -> float:
        return statistics.median(values(run) / values(base) for run, base in zip(runs[name], sync, strict=True))

    return {
        name: {
            "goodput_tokens_per_s": round(statistics.median(run.goodput_tokens_per_s for run in found), 2),
            "seconds_per_update": round(statistics.median(run.seconds / run.updates for run in found), 3),
            "ratio_to_sync": round(ratio(name, lambda run: run.goodput_tokens_per_s), 3),
            "ratios": [
                round(run.goodput_tokens_per_s / base.goodput_tokens_per_s, 3)
                for run, base in zip(found, sync, strict=True)
            ],
            "ideal_ratio": round(ratio(name, lambda run: run.tokens / run.ideal_s), 3),
            "gap": round(statistics.median(1 - run.ideal_s / run.seconds for run in found), 4),
            "target": TARGETS.get(name),
            "staleness_max": max(run.staleness_max for run in found),
            "window_staleness_max": max(run.window_staleness_max for run in found),
        }
        for name, found in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    warm, counted, extra = (0, 2, SHORT) if arguments.short else (WARM_UPDATES, COUNTED_UPDATES, ())
    runs: dict[str, list[Measured]] = {arm.name: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, chdir(folder):
        for repeat in range(1 if arguments.short else arguments.repeats):
            for arm in ARMS:
                found = measure(arm, seed=arguments.seed + repeat, warm=warm, counted=counted, extra=extra)
                runs[arm.name].append(found)
                if not arguments.json:
                    print(
                        f"repeat {repeat}  {arm.name:14} {found.seconds:7.1f} s  ideal {found.ideal_s:7.1f} s",
                        flush=True,
                    )
    shown = report(runs)
    if arguments.json:
        print(json.dumps(shown, indent=1))
        return
    for name, row in shown.items():
        print(
            f"{name:14} {row['goodput_tokens_per_s']:8.2f} tok/s  {row['ratio_to_sync']:5.2f} x sync "
            f"(ideal {row['ideal_ratio']:.2f}, target {row['target'] or '-'})  gap to ideal {row['gap']:.1%}"
        )


if __name__ == "__main__":
    main()
