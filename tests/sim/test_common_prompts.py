"""Prompts that begin alike in all groups, such as tool schemas: `ctb` in virtual time beside `lru`, whose engine finds
them by itself."""

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
