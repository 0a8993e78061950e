"""I11 in virtual time: rank-seconds are conserved, and each lands where it belongs."""

from __future__ import annotations

import asyncio

import pytest
from support.virtual_runs import HEAVY_TAIL, virtual_run

from tiderl.data.events import BackwardDone, ForwardDone, ReferenceDone, UpdateCommitted
from tiderl.observe import account as account_module
from tiderl.observe.account import CATEGORIES, Account

CASES = {
    "areal": [HEAVY_TAIL],
    "sync": ["schedule.strategy=sync", HEAVY_TAIL],
    "one rank": ["cluster.ranks=1"],
    "four ranks": ["cluster.ranks=4", "schedule.max_staleness=3", HEAVY_TAIL],
    "window": ["schedule.staleness_counts=window", HEAVY_TAIL],
    "several steps": ["train.steps_per_batch=3"],
    "no reference": ["algorithm.kl_coef=0"],
}


def account_of(log) -> dict[str, float]:
    account = Account()
    for event in log.events:
        account.observe(event)
    found = account.summary()
    assert found is not None
    return found


def span_s(log) -> float:
    first = next(e.t_s for e in log.events if type(e).__name__ in ("PromptIssued", "TaskAdmitted"))
    return log.of(UpdateCommitted)[-1].t_s - first


@pytest.mark.parametrize("case", CASES)
def test_rank_seconds_are_conserved_and_nothing_is_left_unexplained(case) -> None:
    run = virtual_run(CASES[case])
    found = account_of(run.log)
    total = run.ports.cluster.ranks * span_s(run.log)
    assert list(found) == list(CATEGORIES)
    assert sum(found.values()) == pytest.approx(total, rel=1e-12)
    assert abs(found["other"]) <= 1e-9 * total
    assert min(found.values()) >= -1e-9 * total
    assert found["useful_decode"] > 0 and found["useful_train"] > 0


def test_the_trainers_time_is_that_of_its_calls() -> None:
    run = virtual_run([HEAVY_TAIL])
    found = account_of(run.log)
    assert found["useful_reference"] == pytest.approx(sum(e.seconds for e in run.log.of(ReferenceDone)))
    calls = sum(e.seconds for e in run.log.of(ForwardDone, BackwardDone))
    updates = run.log.of(UpdateCommitted)
    assert calls < found["useful_train"] < sum(u.seconds for u in updates)
    waited = found["starve_wait"]
    assert waited == pytest.approx(sum(u.waited_s for u in updates), rel=0.05)


def test_sync_waits_for_its_tail_and_areal_for_its_bound() -> None:
    sync, areal = (
        account_of(virtual_run([f"schedule.strategy={name}", "cluster.ranks=4", HEAVY_TAIL]).log)
        for name in ("sync", "areal")
    )
    assert sync["starve_wait"] == 0, "the rank that trains generates meanwhile"
    assert sync["env_wait"] > 0.5 * sum(sync.values())
    assert areal["starve_wait"] > 0
    assert sync["recompute_version"] == 0, "no turn spans a version"


def test_memory_too_small_shows_as_recomputation() -> None:
    roomy = account_of(virtual_run([HEAVY_TAIL]).log)
    tight = account_of(virtual_run([HEAVY_TAIL, "rollout.kv_budget_tokens=400"]).log)
    assert tight["recompute_evicted"] > roomy["recompute_evicted"] == 0


@pytest.mark.parametrize("strategy", ["areal", "sync"])
def test_folding_changes_no_sum(monkeypatch, strategy: str) -> None:
    """Under sync nothing is in flight at the last commit, so all is folded by then."""
    run = virtual_run([HEAVY_TAIL, "cluster.ranks=4", "train.updates=12", f"schedule.strategy={strategy}"])
    at_once = account_of(run.log)
    monkeypatch.setattr(account_module, "FOLD_TURNS", 5)
    folded = account_of(run.log)
    assert folded == pytest.approx(at_once, rel=1e-9, abs=1e-9)


def test_what_a_dead_trainer_had_done_and_its_absence_are_no_useful_work() -> None:
    plain = account_of(virtual_run(["eval.every_updates=0"]).log)
    lost: list[float] = []

    async def beside(run, ports) -> None:
        while not (run._training and run._training.buffer.taken):
            await asyncio.sleep(0.001)
        ports.cluster.lose(1)
        lost.append(asyncio.get_running_loop().time())
        await asyncio.sleep(5.0)
        ports.cluster.restore(1)

    found = account_of(virtual_run(["eval.every_updates=0"], beside=beside).log)
    assert lost
    assert found["useful_train"] == pytest.approx(plain["useful_train"], rel=0.02)
    assert found["restart"] > 5.0
    assert abs(found["other"]) < 1e-6
