"""What the decisions of continuous task batching cost: microseconds of each, on one replica with many tasks in flight.

    python bench/decisions.py [--tasks 1000 10000] [--calls 20000] [--repeats 3] [--json]
    python bench/decisions.py --short           # checks the books after every event, times nothing

Tasks of two kinds run through a pool in virtual time, always so many in flight: one pool holds everybody (`free`), one
half of that, so that turns wait and take KV from others (`pressed`; one ask may then let several turns go). Every call
is timed by itself, with garbage collection off; the figures are the medians of the repeats. Targets: a median under 50
us with 1,000 tasks, under 200 us with 10,000.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tiderl.data.records import TaskKey
from tiderl.schedule.pool import TaskPool, Verdict
from tiderl.schedule.priority import TaskFacts
from tiderl.schedule.rates import EngineRates
from tiderl.schedule.residents import Resident

TARGETS_US = {1_000: 50.0, 10_000: 200.0}
GROUP = 8
MAX_TURNS = 20
CONTEXT = 8192
FIRST, OBSERVATION, SAID = 500, 250, 60
MEAN_TASK = 1500
"""Tokens of a task in the middle of its life, about."""
TURN_S, WAIT_S = 2.0, 1.0
PRESSED = 0.5
"""Of what everybody needs."""
HOLD_S = 0.25
"""About as long is KV worth holding while others wait: the engine is made as fast."""

T = TypeVar("T")


def facts(resident: Resident, now_s: float) -> TaskFacts:
    """As the runtime makes them, without looking at a group's members."""
    return TaskFacts(
        evaluation=resident.kind == "eval:web",
        group_done_fraction=resident.key.prompt_id % GROUP / GROUP,
        active=resident.state != "waiting",
        context_fraction=resident.context_tokens / CONTEXT,
    )


@dataclass
class World:
    """One pool and its tasks. Events are (moment, number, task, what): a turn ends, or its environment has worked."""

    tasks: int
    budget_tokens: int
    seed: int
    checked: bool = False
    us: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of each sort of call, one by one."""

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.rates = EngineRates()
        self.pool = TaskPool(
            self.budget_tokens,
            {},
            self.rates,
            max_turns=MAX_TURNS,
            max_context_tokens=CONTEXT,
            block_tokens=16,
            shares_prompts=True,
        )
        self.now_s = 0.0
        self.events: list[tuple[float, int, TaskKey, str]] = []
        self.contexts: dict[TaskKey, int] = {}
        self.ends: dict[TaskKey, int] = {}
        self.turns: dict[TaskKey, int] = {}
        self.admitted = self.numbers = 0
        self.timed = False
        for _ in range(self.tasks):
            self.admit()

    def call(self, sort: str, decide: Callable[[], T]) -> T:
        if not self.timed:
            return decide()
        started = time.perf_counter_ns()
        found = decide()
        self.us[sort].append((time.perf_counter_ns() - started) / 1000.0)
        return found

    def later(self, seconds: float, key: TaskKey, what: str) -> None:
        self.numbers += 1
        heapq.heappush(self.events, (self.now_s + seconds, self.numbers, key, what))

    def admit(self) -> None:
        split = "eval" if self.admitted % 50 == 0 else "train"
        key = TaskKey(split, self.admitted // GROUP, self.admitted % GROUP)
        self.admitted += 1
        self.contexts[key], self.turns[key] = FIRST, 0
        self.ends[key] = self.dice.randint(1, MAX_TURNS)
        self.pool.admit(key, f"{split}:web", (split, key.prompt_id), FIRST, facts, self.now_s)
        self.later(self.dice.uniform(0.0, WAIT_S + TURN_S), key, "asks")

    def go(self, verdict: Verdict) -> None:
        for key in verdict.go:
            self.later(self.dice.uniform(0.5, 1.5) * TURN_S, key, "ended")

    def step(self) -> None:
        self.now_s, _, key, what = heapq.heappop(self.events)
        if what == "asks":
            verdict = self.pool_asks(key)
        else:
            verdict = self.turn_ended(key)
        self.go(verdict)
        if self.checked:
            assert not verdict.go or self.pool.used_tokens <= self.budget_tokens, "I4"

    def pool_asks(self, key: TaskKey) -> Verdict:
        pool, context = self.pool, self.contexts[key]
        started = time.perf_counter_ns()
        verdict = pool.ask(key, context, 512, self.now_s)
        us = (time.perf_counter_ns() - started) / 1000.0
        if self.timed:
            sort = "ask, KV leaves" if verdict.departures else "ask, room" if key in verdict.go else "ask, waits"
            self.us[sort].append(us)
        return verdict

    def turn_ended(self, key: TaskKey) -> Verdict:
        pool = self.pool
        said = self.dice.randint(SAID // 2, SAID * 3 // 2)
        self.contexts[key] += said
        self.turns[key] += 1
        context = self.contexts[key]
        self.rates.observe(
            computed_tokens=300,
            new_tokens=said,
            prefill_s=300 * HOLD_S / self.budget_tokens,
            decode_s=TURN_S,
            running=self.dice.randint(1, 256),
        )

        def ended() -> Verdict:
            pool.ended(key, context, said, self.now_s)
            return pool.pump(self.now_s)

        verdict = self.call("ended and pump", ended)
        self.call("when is KV due", lambda: pool.next_due_s(self.now_s))
        self.call("admission", lambda: pool.room_for("train:web", FIRST, self.now_s))
        if self.turns[key] < self.ends[key]:
            self.contexts[key] += OBSERVATION
            self.later(self.dice.lognormvariate(0.0, 1.0) * WAIT_S, key, "asks")
            return verdict
        self.go(verdict)

        def left() -> Verdict:
            pool.leave(key, finished=True)
            return pool.pump(self.now_s)

        verdict = self.call("leave and pump", left)
        del self.contexts[key], self.turns[key], self.ends[key]
        self.admit()
        return verdict

    def close(self) -> None:
        """Everybody leaves; nothing may be left in the books."""
        for key in list(self.contexts):
            self.pool.leave(key, finished=False)
        assert (self.pool.used_tokens, len(self.pool), self.pool.booked_tokens) == (0, 0, 0.0), "the books do not close"


def measured(tasks: int, calls: int, seed: int, *, pressed: bool, timed: bool = True) -> dict[str, list[float]]:
    """Microseconds of every call by sort, after everybody has had a few turns."""
    need = tasks * MEAN_TASK
    world = World(tasks, max(CONTEXT, int(PRESSED * need) if pressed else 2 * need), seed, checked=not timed)
    for _ in range(6 * tasks):
        world.step()
    if timed:
        world.timed = True
        gc.collect()
        gc.disable()
    try:
        for _ in range(calls):
            world.step()
    finally:
        gc.enable()
    world.close()
    return world.us


def figures(tasks: int, calls: int, repeats: int, *, pressed: bool) -> list[dict[str, Any]]:
    runs = [measured(tasks, calls, seed, pressed=pressed) for seed in range(repeats)]
    rows = []
    for sort in sorted(set.union(*(set(run) for run in runs))):
        of_sort = [sorted(run[sort]) for run in runs if sort in run]
        median_us = statistics.median(statistics.median(us) for us in of_sort)
        rows.append(
            {
                "tasks": tasks,
                "pool": "pressed" if pressed else "free",
                "decision": sort,
                "calls": sum(map(len, of_sort)),
                "median_us": round(median_us, 1),
                "p99_us": round(statistics.median(us[int(0.99 * (len(us) - 1))] for us in of_sort), 1),
                "target_us": TARGETS_US.get(tasks),
                "within": tasks not in TARGETS_US or median_us < TARGETS_US[tasks],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", type=int, default=[1_000, 10_000], help="in flight on the replica")
    parser.add_argument("--calls", type=int, default=10_000, help="events that are timed in each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="checks only")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.short:
        for pressed in (False, True):
            measured(100, 2_000, 0, pressed=pressed, timed=False)
        print(json.dumps({"checked": True}) if args.json else "the books are right after every event")
        return
    rows = [
        row
        for tasks in args.tasks
        for pressed in (False, True)
        for row in figures(tasks, args.calls, args.repeats, pressed=pressed)
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(
            f"{row['tasks']:>6} {row['pool']:<8} {row['decision']:<16} median {row['median_us']:7.1f} us   "
            f"p99 {row['p99_us']:8.1f} us   {row['calls']} calls{'' if row['within'] else '   ABOVE THE TARGET'}"
        )


if __name__ == "__main__":
    main()
