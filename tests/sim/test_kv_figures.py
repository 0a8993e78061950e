"""Runs under `ctb` and `lru` in virtual time: what the result says of KV is what its events say, counted slowly."""

from __future__ import annotations

from collections import defaultdict

import pytest
from support.virtual_runs import Log, virtual_run

from tiderl.data.events import KvRetention, TaskMigrated, TaskPaused, TaskResumed, TurnFinished
from tiderl.observe.metrics import RunMetrics

SCARCE = ("rollout.max_context_tokens=128", "rollout.kv_budget_tokens=300")
"""Room for two or three of the twelve tasks and more that are in flight."""
WAITS = "env.wait={kind: lognormal, median_s: 0.2, sigma: 1.2}"


def summary_of(log: Log) -> dict:
    metrics = RunMetrics()
    for event in log.events:
        metrics.observe(event)
    return metrics.summary()


def reprefilled(log: Log) -> int:
    """Position by position: a turn computes those after the cached ones; which of them had its task computed?"""
    computed: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    again = 0
    for turn in log.of(TurnFinished):
        if turn.split == "train":
            known = computed[turn.prompt_id, turn.member, turn.attempt]
            now = set(range(turn.cached_tokens, turn.context_tokens))
            again += len(known & now)
            known |= now | set(range(turn.context_tokens, turn.context_tokens + turn.new_tokens - 1))
            known |= set(range(turn.cached_tokens))
    return again


@pytest.mark.parametrize("kv_policy", ["lru", "ctb"])
def test_what_is_computed_again_is_counted_position_by_position(kv_policy: str) -> None:
    run = virtual_run([f"rollout.kv_policy={kv_policy}", *SCARCE, WAITS])
    shown, turns = summary_of(run.log), [turn for turn in run.log.of(TurnFinished) if turn.split == "train"]
    assert shown["kv_policy"] == kv_policy
    assert shown["kv_reprefilled_tokens"] == reprefilled(run.log) > 0
    context, cached = (sum(getattr(turn, name) for turn in turns) for name in ("context_tokens", "cached_tokens"))
    assert shown["kv_hit_fraction"] == cached / context


@pytest.mark.parametrize("budget_tokens", [200, 300, 400])
def test_pauses_and_retention_are_those_of_the_events(budget_tokens: int) -> None:
    run = virtual_run(["rollout.kv_policy=ctb", *SCARCE, f"rollout.kv_budget_tokens={budget_tokens}", WAITS])
    shown, since, paused_s = summary_of(run.log), {}, 0.0
    for event in run.log.of(TaskPaused, TaskResumed):
        key = (event.split, event.prompt_id, event.member)
        if isinstance(event, TaskPaused):
            assert key not in since
            since[key] = event.t_s
        else:
            paused_s += event.t_s - since.pop(key)
    assert since == {}
    waits = run.log.of(KvRetention)
    assert shown["tasks_paused"] == len(run.log.of(TaskPaused))
    assert shown["paused_s"] == pytest.approx(paused_s, rel=1e-12)
    assert shown["tasks_migrated"] == len(run.log.of(TaskMigrated))
    assert shown["kv_departures"] == sum(wait.choice in ("drop", "offload") for wait in waits) > 0
    cost_s, clairvoyant_s = sum(w.cost_s for w in waits), sum(w.clairvoyant_s for w in waits)
    assert shown["kv_retention_ratio"] == (pytest.approx(cost_s / clairvoyant_s) if clairvoyant_s else None)
    assert cost_s >= clairvoyant_s
    assert budget_tokens > 200 or shown["tasks_paused"] > 0
    assert sum(shown["account"].values()) == pytest.approx(shown["account_total_rank_s"])


def test_with_room_for_all_nobody_pauses_and_nothing_is_computed_twice() -> None:
    shown = summary_of(virtual_run(["rollout.kv_policy=ctb", "schedule.strategy=sync", WAITS]).log)
    assert (shown["tasks_paused"], shown["paused_s"], shown["kv_departures"]) == (0, 0.0, 0)
    assert shown["kv_reprefilled_tokens"] == 0
    assert shown["kv_retention_ratio"] is None
    assert shown["account"]["kv_stall"] == shown["account"]["recompute_evicted"] == 0
