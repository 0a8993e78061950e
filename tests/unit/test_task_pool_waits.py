"""Nobody waits without bound: small and 20 times larger prompts in a pool that is always full."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter

import pytest
from support.pool_play import admitted, rates_of, train

from tiderl.data.records import TaskKey
from tiderl.schedule.pool import TaskPool

PATIENCE_S, LONGEST_S, WAIT_S, TURNS = 3.0, 2.0, 0.5, 4


class WithoutPatience(TaskPool):
    def __init__(self, *arguments: object, **others: object) -> None:
        super().__init__(*arguments, **others)  # type: ignore[arg-type]
        self._ready.patience_s = 1e9


def waits_of(make: type[TaskPool], seed: int) -> tuple[list[tuple[float, float]], float]:
    """How long each turn of a large task waited for room, with its bound, and how far apart the members ended.

    One group of four with prompts 20 times as large as those of evaluations, of which there are always so many that
    they fill the pool, and which go first."""
    dice, events, numbers = random.Random(seed), [], itertools.count()
    pool = make(480, {}, rates_of(1e-3), max_turns=TURNS, max_context_tokens=480, patience_s=PATIENCE_S)
    context: dict[TaskKey, int] = {}
    turns: Counter[TaskKey] = Counter()
    waiting: dict[TaskKey, tuple[float, int]] = {}
    waits, ended_s = [], {}

    def admit(key: TaskKey, tokens: int, now_s: float) -> None:
        context[key] = tokens
        admitted(pool, key)
        heapq.heappush(events, (now_s + dice.random(), next(numbers), "asks", key))

    for number in range(30):
        admit(TaskKey("eval", number, 0), 15, 0.0)
    for member in range(4):
        admit(train(member), 300, 0.0)
    evaluations, due_s = 30, math.inf
    while any(key.split == "train" for key in context):
        if due_s < events[0][0]:
            now_s, what = due_s, "due"
        else:
            now_s, _, what, key = heapq.heappop(events)
        if now_s > 200.0:
            return [(math.inf, 0.0)], math.inf
        if what == "asks":
            waiting[key] = (now_s, len(waiting))
            verdicts = [pool.ask(key, context[key], 10, now_s)]
        elif what == "ended":
            context[key] += 10
            turns[key] += 1
            pool.ended(key, context[key], 10, now_s)
            verdicts = [pool.pump(now_s)]
            if turns[key] < TURNS:
                context[key] += 5
                heapq.heappush(events, (now_s + WAIT_S, next(numbers), "asks", key))
            else:
                pool.leave(key, finished=True)
                verdicts.append(pool.pump(now_s))
                del context[key]
                ended_s[key] = now_s
                if key.split == "eval":
                    admit(TaskKey("eval", evaluations, 0), 15, now_s)
                    evaluations += 1
        else:
            verdicts = [pool.pump(now_s)]
        for went in (went for verdict in verdicts for went in verdict.go):
            since_s, ahead = waiting.pop(went)
            if went.split == "train":
                waits.append((now_s - since_s, PATIENCE_S + (ahead + 1) * LONGEST_S))
            heapq.heappush(events, (now_s + LONGEST_S * dice.uniform(0.3, 1.0), next(numbers), "ended", went))
        due_s = pool.next_due_s(now_s) or math.inf
    done_s = [moment for key, moment in ended_s.items() if key.split == "train"]
    return waits, max(done_s) - min(done_s)


@pytest.mark.parametrize("seed", range(4))
def test_large_prompts_wait_no_longer_than_the_bound_and_their_group_ends_together(seed: int) -> None:
    waits, spread_s = waits_of(TaskPool, seed)
    assert len(waits) == 4 * TURNS
    assert all(waited_s <= bound_s for waited_s, bound_s in waits)
    assert max(waits)[0] > PATIENCE_S, "nobody came to the end of the patience"
    assert spread_s <= TURNS * (max(bound_s for _, bound_s in waits) + LONGEST_S + WAIT_S)


def test_without_patience_the_bound_is_broken() -> None:
    waits, _ = waits_of(WithoutPatience, 0)
    assert any(waited_s > bound_s for waited_s, bound_s in waits)
