"""A window of images: what the cache finds, what the trainer computes and the goodput, by how many leave at once.

    python bench/image_window.py [--tasks 16 32 64 128] [--updates 14] [--seeds 0 1 …] [--rollout-ranks 16] [--json]

Desktop agents with screenshots, `examples/sim/osworld-4b-32xh100.yaml`. Three parts: the structural figures of its
tasks (what a cache without end finds, counted turn by turn); one replica with all tasks started at once, as in
`bench/kv_cliff.py`; and the whole file. All figures are of virtual time: another machine prints the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from tiderl.api.drivers import VirtualRun
from tiderl.api.result import Fanout
from tiderl.api.virtual import World, simulated_world
from tiderl.config.machine import prepare
from tiderl.config.resolve import Resolved
from tiderl.data.events import Event, UpdateCommitted
from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.turns import Sampling, Turn
from tiderl.observe.metrics import RunMetrics
from tiderl.sim.engine import SimEngine
from tiderl.sim.loop import run_virtual
from tiderl.sim.ranks import SimRank
from tiderl.sim.workload import Workload

FILE = Path(__file__).parents[1] / "examples" / "sim" / "osworld-4b-32xh100.yaml"
WINDOW = 5  # images, published
NONE = "none"
DROPS = (NONE, 1, 2, 3, 4, 5)
TASKS = (16, 32, 64, 128)
COUNTED_GROUPS = 256  # for the structural figures
SKIPPED = 5
"""Updates at the start of the whole file that its goodput leaves out."""

Drop = int | str


@dataclass(frozen=True)
class Structure:
    """What a cache without end finds of the contexts, and what the trainer sees of a trajectory."""

    drop: Drop
    kv_hit_fraction: float
    prefilled_tokens: float  # of a trajectory
    sequences: float
    trained_tokens: float
    kv_hit_fraction_text_leaves: float | None
    """If with each image the text of its turn, the action, left too."""


@dataclass(frozen=True)
class Slice:
    """One replica: every task from its reset to its end, all started at once."""

    drop: Drop
    tasks: int
    kv_hit_fraction: float
    tokens_per_s: float  # sampled
    seconds: float
    preemptions: int


@dataclass(frozen=True)
class Whole:
    """The file under one seed. Goodput is that of the updates after the first `SKIPPED`."""

    drop: Drop
    seed: int
    kv_hit_fraction: float
    goodput_tokens_per_s: float
    trained_tokens: float  # of a trajectory, all of its sequences
    update_s: float
    trainer_waits_s: float  # of an update, for data


@dataclass(frozen=True)
class Gain:
    """Goodput of the whole file over that with a drop of 1, of the same seed."""

    drop: Drop
    median: float
    least: float
    most: float


def overrides(drop: Drop) -> list[str]:
    if drop == NONE:
        return ["rollout.image_window=none"]
    return [f"rollout.image_window={WINDOW}", f"rollout.image_window_drop={drop}"]


def world_of(drop: Drop, *more: str) -> tuple[Resolved, World, Workload]:
    resolved = prepare(FILE, [*overrides(drop), "eval.every_updates=0", *more], command="sim")
    world = simulated_world(resolved)
    (workload,) = world.workloads.values()
    assert isinstance(workload, Workload)
    return resolved, world, workload


# ------------------------------------------------------------------------------------------- structure

Part = tuple[str, int, int]
"""(`text`, `image` or `said`, the turn that it came with, tokens)."""


def contexts(
    workload: Workload, key: TaskKey, drop: Drop, *, text_leaves: bool = False
) -> Iterator[tuple[list[Part], Part]]:
    """Context and action of each turn, part by part."""
    turns = min(workload.turns(key), workload.max_turns)
    context: list[Part] = [("text", -1, workload.first_tokens(key))]
    for turn in range(turns):
        said = ("said", turn, min(workload.action_tokens(key, turn), workload.max_new_tokens_per_turn))
        yield list(context), said
        context.append(said)
        images = [part[1] for part in context if part[0] == "image"]
        if drop != NONE and len(images) == WINDOW:
            leaving = images[: int(drop)]
            # What is said to an image comes in the turn after it.
            gone = {("image", one) for one in leaving} | {("said", one + 1) for one in leaving if text_leaves}
            context = [part for part in context if part[:2] not in gone]
        context.append(("image", turn, workload.observation_tokens(key, turn)))


def tokens(parts: Sequence[Part]) -> int:
    return sum(part[2] for part in parts)


def common(one: Sequence[Part], other: Sequence[Part]) -> int:
    """Tokens that both begin with."""
    found = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        found += left[2]
    return found


def structure(drop: Drop, groups: int = COUNTED_GROUPS) -> Structure:
    resolved, _, workload = world_of(drop)
    size = resolved.settings.group_size
    keys = [TaskKey("train", group, member) for group in range(groups) for member in range(size)]
    context = hit = sequences = trained = 0
    for key in keys:
        before: list[Part] = []
        for parts, said in contexts(workload, key, drop):
            found = common(before, parts)
            if before and found < tokens(before):  # it forked
                sequences, trained = sequences + 1, trained + tokens(before)
            # All members but the first find their prompt, all but its last position.
            shared = 0 if key.member == 0 else workload.first_tokens(key) - 1
            hit += min(found, tokens(before) - 1) if before else shared
            context += tokens(parts)
            before = [*parts, said]
        sequences, trained = sequences + 1, trained + tokens(before)
    leaves = None if drop == NONE else _hit_where_text_leaves(workload, keys, drop)
    count = len(keys)
    return Structure(drop, hit / context, (context - hit) / count, sequences / count, trained / count, leaves)


def _hit_where_text_leaves(workload: Workload, keys: Sequence[TaskKey], drop: Drop) -> float:
    context = hit = 0
    for key in keys:
        before: list[Part] = []
        for parts, said in contexts(workload, key, drop, text_leaves=True):
            shared = 0 if key.member == 0 else workload.first_tokens(key) - 1
            hit += min(common(before, parts), tokens(before) - 1) if before else shared
            context += tokens(parts)
            before = [*parts, said]
    return hit / context


# ------------------------------------------------------------------------------------------- one replica


def one_replica(drop: Drop, tasks: int) -> Slice:
    resolved, world, workload = world_of(drop)
    settings = resolved.settings
    context = cached = sampled = 0

    async def task(engine: SimEngine, key: TaskKey) -> None:
        nonlocal context, cached, sampled
        plan = workload.plan(key)
        await asyncio.sleep(plan.reset_s)
        for number, turn in enumerate(plan.turns):
            ids = np.broadcast_to(np.int32(0), (turn.context_tokens,))
            sampling = Sampling(1.0, settings.max_new_tokens_per_turn, ())
            asked = Turn(key, number, ids, sampling, settings.max_context_tokens, rewrites=turn.rewrites)
            result = await engine.generate(asked)
            context += turn.context_tokens
            cached += result.cached_tokens
            sampled += len(result.ids)
            await asyncio.sleep(turn.step_s)
        engine.release(key)

    async def main() -> tuple[float, int]:
        engine = SimEngine(0, [SimRank(0)], world.cost, world.engine, workload, {})
        await engine.load_weights(WeightHandle(0, "", 0))
        size = settings.group_size
        async with asyncio.TaskGroup() as group:
            for number in range(tasks):
                group.create_task(task(engine, TaskKey("train", number // size, number % size)))
        return asyncio.get_running_loop().time(), engine.stats.preemptions

    seconds, preemptions = run_virtual(main)
    return Slice(drop, tasks, cached / context, sampled / seconds, seconds, preemptions)


# ------------------------------------------------------------------------------------------- the whole file


class Commits:
    """The committed updates of a run, in order."""

    def __init__(self) -> None:
        self.updates: list[UpdateCommitted] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, UpdateCommitted):
            self.updates.append(event)


def whole(drop: Drop, seed: int, updates: int, *more: str) -> Whole:
    resolved, _, _ = world_of(drop, f"seed={seed}", f"train.updates={updates}", *more)
    commits, metrics = Commits(), RunMetrics()
    run_virtual(VirtualRun(resolved, Fanout([], metrics, [commits])).to_its_end)
    figures = metrics.figures()
    chosen = commits.updates[SKIPPED:]
    seconds = chosen[-1].t_s - commits.updates[SKIPPED - 1].t_s
    return Whole(
        drop=drop,
        seed=seed,
        kv_hit_fraction=figures["kv_hit_fraction"],
        goodput_tokens_per_s=sum(update.loss_tokens for update in chosen) / seconds,
        trained_tokens=figures["trained_tokens_mean"],
        update_s=seconds / len(chosen),
        trainer_waits_s=sum(update.waited_s for update in chosen) / len(chosen),
    )


def gains(rows: Sequence[Whole]) -> list[Gain]:
    by = {(row.drop, row.seed): row.goodput_tokens_per_s for row in rows}
    seeds = {row.seed: None for row in rows}
    ratios = {drop: [by[drop, seed] / by[1, seed] for seed in seeds] for drop in DROPS}
    return [Gain(drop, median(found), min(found), max(found)) for drop, found in ratios.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="*", default=list(TASKS), help="on the one replica; none: left out")
    parser.add_argument("--updates", type=int, default=14, help=f"of the whole file, more than {SKIPPED}; 0: left out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the whole file")
    parser.add_argument("--rollout-ranks", type=int, help="of the whole file; default: its own")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if 0 < args.updates <= SKIPPED:
        parser.error(f"--updates must be more than {SKIPPED}, or 0")
    more = [] if args.rollout_ranks is None else [f"cluster.rollout_ranks={args.rollout_ranks}"]
    runs = [whole(drop, seed, args.updates, *more) for seed in args.seeds for drop in DROPS] if args.updates else []
    parts = {
        "structure": [structure(drop) for drop in DROPS],
        "one_replica": [one_replica(drop, tasks) for tasks in args.tasks for drop in DROPS],
        "whole": runs,
        "gain_over_drop_1": gains(runs) if runs else [],
    }
    if args.json:
        print(json.dumps({name: [asdict(row) for row in rows] for name, rows in parts.items()}))
        return
    for name, rows in parts.items():
        print(f"\n{name}")
        for place, row in enumerate(rows):
            values = asdict(row)
            if place == 0:
                print("  ".join(f"{key:>{max(len(key), 10)}}" for key in values))
            print("  ".join(f"{_shown(value):>{max(len(key), 10)}}" for key, value in values.items()))


def _shown(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
    return str(value)


if __name__ == "__main__":
    main()
