"""The simulated ports keep what every implementation promises, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support import environments_suite
from support.ports_suite import PROMISES, Promise, Subject, check, name_of

from tiderl.cost import cost_model
from tiderl.data.settings import EngineSettings, ModelSettings, WorkloadProfile
from tiderl.sim.cluster import SimCluster
from tiderl.sim.environments import SimEnvironments
from tiderl.sim.loop import run_virtual
from tiderl.sim.transfer import TransferKind
from tiderl.sim.workload import Workload

MODEL = ModelSettings(path="scratch", vocab_size=64, max_context_tokens=128, pad_id=0, stop_ids=(1,))
PROFILE = WorkloadProfile(
    turns_median=5.0,
    turns_sigma=0.5,
    first_observation_tokens=15.0,
    observation_tokens=10.0,
    observation_sigma=0.2,
    action_tokens=6.0,
    action_sigma=0.5,
    step_s=0.001,
    step_sigma=0.5,
)
LAYOUTS = {
    "apart": {0: (0,)},
    "two engines, one beside the actor": {0: (0,), 1: (1,)},
    "one engine on two ranks": {0: (0, 2)},
}


def workload() -> Workload:
    return Workload(0, PROFILE, max_turns=16, max_context_tokens=128, max_new_tokens_per_turn=8)


def subject(layout: str, weight_sync: TransferKind = "relay", block: int = 16, kv_policy: str = "lru") -> Subject:
    settings = EngineSettings(
        MODEL, kv_budget_tokens=512, kv_block_tokens=block, kv_policy=kv_policy, host_kv_budget_tokens=256
    )
    # Reference and actor take turns on their rank, so that the swap between them is in every promise.
    cost = replace(cost_model("this-cpu", MODEL), swap_one_way_s=0.001)
    cluster = SimCluster(LAYOUTS[layout], [1], cost, workload(), settings, weight_sync=weight_sync)
    return Subject(cluster, vocab_size=64, max_context_tokens=128)


@pytest.mark.parametrize("kv_policy", ["lru", "ctb"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("promise", PROMISES, ids=name_of)
def test_simulated_cluster(promise: Promise, layout: str, kv_policy: str) -> None:
    run_virtual(lambda: check(lambda: subject(layout, kv_policy=kv_policy), promise))


@pytest.mark.parametrize("weight_sync", ["broadcast", "delta"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("promise", PROMISES, ids=name_of)
def test_simulated_cluster_by_weight_sync(promise: Promise, layout: str, weight_sync: TransferKind) -> None:
    run_virtual(lambda: check(lambda: subject(layout, weight_sync, block=1), promise))


@pytest.mark.parametrize("promise", environments_suite.CHECKS, ids=lambda check: check.__name__)
def test_simulated_environments(promise: Callable[..., None]) -> None:
    def make(slots: int) -> SimEnvironments:
        return SimEnvironments(workload(), slots=slots, deadline_s=30.0, eval_prompts=10)

    run_virtual(lambda: promise(make))
