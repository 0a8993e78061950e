"""Simulated workloads: pure functions of identity, with the profile's medians, correlation and cuts."""

from __future__ import annotations

import math
import random
import statistics

import msgspec
import pytest

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import TaskKey
from tiderl.data.settings import WaitProfile, WorkloadProfile
from tiderl.sim.draws import Draws
from tiderl.sim.workload import Workload

PROFILE = WorkloadProfile(
    turns_median=7.0,
    turns_sigma=0.5,
    first_observation_tokens=30.0,
    observation_tokens=25.0,
    observation_sigma=0.4,
    action_tokens=40.0,
    action_sigma=0.6,
    step_s=0.5,
    step_sigma=1.0,
    reset_s=2.0,
    group_correlation=0.6,
    success_fraction=0.3,
)


def workload(
    seed: int = 0, profile: WorkloadProfile = PROFILE, wait: WaitProfile | None = None, **cuts: int
) -> Workload:
    limits = {"max_turns": 1000, "max_context_tokens": 10**6, "max_new_tokens_per_turn": 10**6, **cuts}
    return Workload(seed, profile, wait=wait, **limits)


def key(prompt: int, member: int = 0, attempt: int = 0, split: str = "train") -> TaskKey:
    return TaskKey(split, prompt, member, attempt)  # type: ignore[arg-type]


def everything(w: Workload, task: TaskKey) -> tuple[object, ...]:
    turns = tuple((w.action_tokens(task, t), w.observation_tokens(task, t), w.step_s(task, t)) for t in range(3))
    return (w.turns(task), w.succeeds(task), w.reset_s(task), turns)


def test_draws_do_not_depend_on_call_order_or_attempt() -> None:
    wait = WaitProfile(0.2, 1.2, 0.3, (3.0, 8.0))
    keys = [key(p, m) for p in range(20) for m in range(4)]
    forward = {task: everything(workload(wait=wait), task) for task in keys}
    other = workload(wait=wait)
    random.Random(1).shuffle(keys)
    assert {task: everything(other, task) for task in keys} == forward
    assert all(everything(other, key(t.prompt_id, t.member, attempt=3)) == forward[t] for t in keys)


def test_seed_split_prompt_member_and_turn_all_matter() -> None:
    w, task = workload(), key(5, 2)
    assert everything(w, task) != everything(workload(seed=1), task)
    assert everything(w, task) != everything(w, key(5, 2, split="eval"))
    assert len({w.step_s(key(p, m), t) for p in range(10) for m in range(10) for t in range(10)}) == 1000


def test_uniform_draws_are_uniform_and_uncorrelated() -> None:
    draws = Draws(3, "test")
    values = [draws.uniform(g, m, t) for g in range(30) for m in range(30) for t in range(30)]
    assert min(values) > 0.0 and max(values) < 1.0
    counts = [0] * 20
    for value in values:
        counts[int(value * 20)] += 1
    expected = len(values) / 20
    # Chi squared with 19 degrees of freedom: 43.8 is its 0.1 % quantile from above.
    assert sum((count - expected) ** 2 / expected for count in counts) < 43.8
    for lag in (1, 30, 900):
        pairs = zip(values, values[lag:], strict=False)
        correlation = sum((a - 0.5) * (b - 0.5) for a, b in pairs) * 12 / (len(values) - lag)
        assert abs(correlation) < 4 / math.sqrt(len(values))


def test_medians_and_sigmas_are_the_profiles() -> None:
    w = workload()
    tasks = [key(p) for p in range(4000)]

    def check(values: list[float], median: float, sigma: float) -> None:
        logs = [math.log(value) for value in values]
        assert statistics.median(values) == pytest.approx(median, rel=0.06)
        assert statistics.pstdev(logs) == pytest.approx(sigma, rel=0.08)

    check([w.turns(task) for task in tasks], 7.0, 0.5)
    check([w.action_tokens(task, 1) for task in tasks], 40.0, 0.6)
    check([w.observation_tokens(task, 1) for task in tasks], 25.0, 0.4)
    check([w.step_s(task, 1) for task in tasks], 0.5, 1.0)
    check([w.reset_s(task) for task in tasks], 2.0, 1.0)
    assert sum(w.succeeds(task) for task in tasks) / 4000 == pytest.approx(0.3, abs=0.03)


def test_members_of_a_group_are_correlated_as_the_profile_says() -> None:
    w = workload()
    first = [math.log(w.turns(key(p, 0))) for p in range(3000)]
    second = [math.log(w.turns(key(p, 1))) for p in range(3000)]
    other = first[1:] + first[:1]
    assert statistics.correlation(first, second) == pytest.approx(0.6, abs=0.05)
    assert statistics.correlation(first, other) == pytest.approx(0.0, abs=0.06)


def test_action_lengths_of_a_group_are_correlated_as_the_profile_says_and_keep_their_distribution() -> None:
    alike = workload(profile=msgspec.structs.replace(PROFILE, action_tokens=400.0, action_correlation=0.7))
    lengths = [[math.log(alike.action_tokens(key(p, m), 1)) for p in range(3000)] for m in (0, 1)]
    assert statistics.correlation(*lengths) == pytest.approx(0.7, abs=0.05)
    assert statistics.pstdev(lengths[0]) == pytest.approx(PROFILE.action_sigma, rel=0.05)
    assert statistics.median(lengths[0]) == pytest.approx(math.log(400.0), abs=0.03)
    other_turn = [math.log(alike.action_tokens(key(p, 0), 2)) for p in range(3000)]
    assert statistics.correlation(lengths[0], other_turn) == pytest.approx(0.0, abs=0.06)
    apart = [[math.log(workload().action_tokens(key(p, m), 1)) for p in range(3000)] for m in (0, 1)]
    assert statistics.correlation(*apart) == pytest.approx(0.0, abs=0.06), "not unless it is asked for"


def test_waits_are_added_and_have_their_tail() -> None:
    wait = WaitProfile(median_s=1.0, sigma=0.5, tail_fraction=0.25, tail_s=(30.0, 50.0))
    plain, slow = workload(), workload(wait=wait)
    extra = [slow.step_s(key(p), 0) - plain.step_s(key(p), 0) for p in range(4000)]
    tail = [seconds for seconds in extra if seconds >= 30.0]
    body = [seconds for seconds in extra if seconds < 30.0]
    assert len(tail) / 4000 == pytest.approx(0.25, abs=0.03)
    assert max(tail) < 50.0 and statistics.mean(tail) == pytest.approx(40.0, rel=0.02)
    assert statistics.median(body) == pytest.approx(1.0, rel=0.05)


def test_plan_adds_up_and_ends_where_the_budgets_say() -> None:
    w = workload(max_turns=9, max_context_tokens=600, max_new_tokens_per_turn=60)
    endings = set()
    for prompt in range(300):
        task = key(prompt)
        plan = w.plan(task)
        endings.add(plan.ending)
        context = 30
        for number, turn in enumerate(plan.turns):
            assert turn.context_tokens == context
            assert turn.action_tokens == min(w.action_tokens(task, number), 60, 600 - context)
            context += turn.action_tokens + turn.observation_tokens
        assert plan.tokens == context <= 600
        assert len(plan.turns) <= 9
        full = w.turns(task)
        if plan.ending == "terminated":
            assert len(plan.turns) == full
            assert plan.reward == float(w.succeeds(task))
        else:
            assert plan.reward == 0.0 and len(plan.turns) < full
        if plan.ending == "budget_turns":
            assert len(plan.turns) == 9
        if plan.ending == "budget_tokens":
            last = len(plan.turns) - 1
            assert context + w.observation_tokens(task, last) >= 600
    assert endings == {"terminated", "budget_turns", "budget_tokens"}


def test_a_context_that_holds_no_first_observation_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="first observation"):
        workload(max_context_tokens=30)
