"""`ctb` in virtual time beside `lru`, where it once lost: prompts that begin alike in all groups, such as tool schemas,
environments that begin late, long prompts of tasks that all wait."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiderl

FAMILY = Path(__file__).parents[2] / "examples" / "sim" / "family-kv.yaml"
LONG_PROMPTS = (
    "cluster.ranks=2",
    "cluster.rollout_ranks=1",
    "train.updates=10",
    "train.global_batch_groups=8",
    "algorithm.group_size=4",
    "sim.workload.first_observation_tokens=4000",
    "sim.workload.observation_tokens=200",
    "sim.workload.action_tokens=200",
)
"""Prompts of 4,000 tokens, contexts of 6,000."""


def goodput(kv_policy: str, *overrides: str) -> float:
    result = tiderl.simulate(FAMILY, [*LONG_PROMPTS, *overrides, f"rollout.kv_policy={kv_policy}"])
    return result["goodput_tokens_per_s"]


@pytest.mark.parametrize("budget_tokens", [20_000, 60_000])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_prompt_common_to_all_groups_costs_no_goodput(budget_tokens: int, seed: int) -> None:
    """Charged once a group, 20,000 tokens held four groups at most, and goodput was 0.7 of that of `lru`."""
    common = ("sim.workload.system_tokens=3900", f"rollout.kv_budget_tokens={budget_tokens}", f"seed={seed}")
    assert goodput("ctb", *common) >= 0.96 * goodput("lru", *common)


SLOW_RESETS = (
    "cluster.ranks=2",
    "cluster.rollout_ranks=1",
    "train.updates=6",
    "train.global_batch_groups=16",
    "env.deadline_s=1000",
    "sim.workload.turns_median=2",
    "sim.workload.reset_s=60",
    "sim.cost.max_batch=16",
    "rollout.kv_budget_tokens=900000",
)


def test_environments_that_begin_late_cost_no_goodput_where_everything_fits() -> None:
    """Counted as turns in the engine, 32 of them were two full batches, and goodput was 0.3 of that of `lru`."""
    lru, ctb = (
        tiderl.simulate(FAMILY, [*SLOW_RESETS, f"rollout.kv_policy={kv_policy}"])["goodput_tokens_per_s"]
        for kv_policy in ("lru", "ctb")
    )
    assert ctb >= 0.97 * lru


LONG_WAITS = (
    "cluster.ranks=2",
    "cluster.rollout_ranks=1",
    "train.updates=10",
    "train.global_batch_groups=8",
    "sim.workload.turns_median=2",
    "sim.workload.first_observation_tokens=4000",
    "sim.workload.observation_tokens=300",
    "sim.workload.action_tokens=100",
    "env.wait={kind: lognormal, median_s: 10, sigma: 0.3}",
    "rollout.kv_budget_tokens=20000",
)


def test_prompts_of_groups_whose_members_all_wait_make_room() -> None:
    """Forecast as held by every group in flight, and not counted as room that due KV leaves, they left half of the
    goodput of `lru`."""
    lru, ctb = (
        tiderl.simulate(FAMILY, [*LONG_WAITS, f"rollout.kv_policy={kv_policy}"])["goodput_tokens_per_s"]
        for kv_policy in ("lru", "ctb")
    )
    assert ctb >= 0.9 * lru
