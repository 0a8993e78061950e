"""The clairvoyant bound: below every legal schedule, above none of its own mutants, right where it can be computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.bound_cases import BEST_HABITS, COST, Case, family, random_case, random_habits
from support.brute_force import Tiny, optimum

from tiderl.cost.bound import LP_GROUP_UPDATES, clairvoyant_bound, closed_forms, issue_order_seconds
from tiderl.cost.interval_lp import interval_seconds
from tiderl.cost.resources import Resources
from tiderl.cost.work import Demand, demand, group_work, trajectory_work
from tiderl.data.errors import ConfigurationError

FAMILIES = ("rollout", "kv", "trainer", "critical_path", "environment", "sync", "all_ranks")
FLOORS = {
    "rollout": 0.9,
    "kv": 0.7,
    "trainer": 0.95,
    "critical_path": 0.6,
    "environment": 0.95,
    "sync": 0.9,
    "all_ranks": 0.75,
}
"""Of rho for the best of three simple schedules. The critical path's is low where the tails could have met in one
update and did not."""
ROUNDING = 1e-9


def assert_no_schedule_is_faster(seeds: range) -> None:
    for seed in seeds:
        case, habits = random_case(seed), random_habits(random_case(seed), seed)
        bound, seconds = case.bound, case.seconds(habits, seed)
        assert bound.seconds <= seconds * (1 + ROUNDING), (seed, bound, seconds)
        if habits.in_order:
            assert bound.order_seconds <= seconds * (1 + ROUNDING), (seed, bound, seconds)


def test_no_legal_schedule_is_faster_than_the_bound() -> None:
    assert_no_schedule_is_faster(range(200))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_legal_schedule_is_faster_than_the_bound_in_two_thousand_cases() -> None:
    assert_no_schedule_is_faster(range(200, 2_200))


# ------------------------------------------------------------------------------------------- families


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_in_each_family_its_own_resource_binds_and_simple_schedules_come_near(name: str, seed: int) -> None:
    case = family(name, seed)
    bound = case.bound
    assert bound.binding == name
    seconds = [case.seconds(habits, seed) for habits in BEST_HABITS]
    assert FLOORS[name] <= bound.seconds / min(seconds) <= 1 + ROUNDING


def a0_counted_twice(work: Demand, have: Resources) -> float:
    """Sum instead of max in L1."""
    shares = COST.iteration_s * work.loss_tokens.sum() / have.max_batch / have.rollout_ranks
    return closed_forms(work, have)["kv"] + float(shares)


def every_chain_whole(work: Demand, have: Resources) -> float:
    """L5 without the mean over eta + 1 chains: as if staleness allowed nothing."""
    return closed_forms(work, replace(have, max_staleness=0))["critical_path"]


def slots_for_whole_tasks(work: Demand, have: Resources) -> float:
    """L4 with slots held while the policy speaks, where they are not."""
    return closed_forms(work, replace(have, slots_held="task"))["environment"]


def every_version_awaited(work: Demand, have: Resources) -> float:
    """L4 of the link with all S - 1 transfers before the last update, whatever the staleness."""
    return (have.updates - 1) * have.link_s


def the_reference_twice(work: Demand, have: Resources) -> float:
    """L3 with one pass too many."""
    return closed_forms(work, have)["trainer"] + float(work.reference_s.sum()) / have.trainer_ranks


def the_prompt_for_each(work: Demand, have: Resources) -> float:
    """L1's context with a common prompt held once for each member. In this family all have the same prompt."""
    prompt_tokens = family("kv").groups[0].prompt_tokens
    shares = COST.iteration_s * prompt_tokens * work.loss_tokens.sum() / have.kv_tokens / have.rollout_ranks
    return closed_forms(work, have)["kv"] + float(shares)


def roles_that_never_change(work: Demand, have: Resources) -> float:
    """Half of the ranks for rollout only, where all may do both."""
    return closed_forms(work, replace(have, shared_ranks=0, rollout_ranks=1, trainer_ranks=1))["trainer"]


MUTANTS: list[tuple[str, Callable[[Demand, Resources], float]]] = [
    ("rollout", a0_counted_twice),
    ("kv", the_prompt_for_each),
    ("trainer", the_reference_twice),
    ("critical_path", every_chain_whole),
    ("environment", slots_for_whole_tasks),
    ("sync", every_version_awaited),
    ("all_ranks", roles_that_never_change),
]


def stale(case: Case) -> Case:
    """The critical path's family with a staleness of 1, where chains matter."""
    return case.with_resources(max_staleness=1) if case.resources.max_staleness == 0 else case


@pytest.mark.parametrize(("name", "mutant"), MUTANTS, ids=[name for name, _ in MUTANTS])
def test_an_invalid_bound_is_caught_by_its_family(name: str, mutant: Callable[[Demand, Resources], float]) -> None:
    case = family(name)
    if name == "critical_path":
        case = stale(case)
    fastest = min(case.seconds(habits, 0) for habits in BEST_HABITS)
    assert case.bound.seconds <= fastest * (1 + ROUNDING)
    assert mutant(case.work, case.resources) > fastest


def test_a_scheduler_that_cheats_staleness_is_caught_by_the_critical_path() -> None:
    case = family("critical_path")
    honest = [replace(habits, laziness=0.0) for habits in BEST_HABITS]
    cheats = [replace(habits, cheat_updates=1) for habits in honest]
    bound = case.bound.seconds
    assert all(case.seconds(habits, 0) >= bound for habits in honest)
    assert any(case.seconds(habits, 0) < bound for habits in cheats)


def test_a_program_with_too_narrow_windows_is_caught() -> None:
    case = stale(family("critical_path"))
    fastest = min(case.seconds(habits, 0) for habits in BEST_HABITS)
    narrow = replace(case.resources, max_staleness=0)
    assert (
        interval_seconds(case.work, case.resources, scale_s=fastest)
        <= fastest
        < interval_seconds(case.work, narrow, scale_s=fastest)
    )


def test_the_program_is_not_idle() -> None:
    """It beats the closed forms in some random cases: otherwise it would not be worth its time."""
    gains = []
    for seed in range(60):
        bound = random_case(seed).bound
        assert bound.lp_seconds is not None
        gains.append(bound.lp_seconds / max(bound.terms.values()))
    assert max(gains) > 1.05


# ------------------------------------------------------------------------------------------- exact values


def test_the_work_of_one_trajectory_by_hand() -> None:
    cost = replace(COST, iteration_s=10.0, sequence_s=1.0, context_token_s=0.1, prefill_token_s=0.01)
    # Prompt 4 (3 common and the last position), two tokens, an observation of 2, one token.
    group = group_work(4, [trajectory_work([(2, 2, 5.0), (1, 9, 7.0)], reset_s=3.0)])
    work = demand([group], cost, kv_tokens=100, max_batch=8, with_reference=True)
    # KV of its own when each token is made: 1, 2; then 1 (the last token) + 2 observed more: 5. Only the second token
    # reads a context without prefill: 3 + 2 = 5 positions.
    read_s = 0.1 * 5
    prefill_s = 0.01 * (3 + 1 + 3)
    assert work.count_s[0] == pytest.approx(prefill_s + 3 * 1.0 + read_s + 10.0 * 3 / 8)
    assert work.context_s[0] == pytest.approx(prefill_s + 3 * 1.0 + read_s + 10.0 * (1 + 2 + 5) / 100)
    assert work.kv_token_s[0] == pytest.approx((1 + 2 + 5) * 11.0 + 0.1 * 2 * 5)
    assert work.latency_s[0] == pytest.approx(prefill_s + 3 * 11.0 + read_s + 12.0)
    assert work.start_latency_s[0] == pytest.approx(3.0 + work.latency_s[0])
    assert work.step_s[0] == pytest.approx(15.0)
    assert work.task_s[0] == pytest.approx(3.0 + work.latency_s[0] - 0.01 * 3)
    # 4 + 2 + 2 + 1 tokens are trained, three of them with a loss.
    assert work.actor_s[0] == pytest.approx(9 * COST.actor_token_s)
    assert work.loss_tokens[0] == 3


def test_the_work_of_a_trajectory_that_forks_by_hand() -> None:
    cost = replace(COST, iteration_s=10.0, sequence_s=1.0, context_token_s=0.1, prefill_token_s=0.01)
    # Prompt 4, two tokens, an image of 5, one token, an image of 5 for which the first one leaves, one token. The last
    # turn keeps prompt and first action, 6 positions, loses the 5 others that have KV, and computes 12 - 6.
    forked = trajectory_work([(2, 5, 0.0), (1, 5, 0.0), (1, 0, 0.0)], forks={2: (6, 5)})
    work = demand([group_work(4, [forked])], cost, kv_tokens=12, max_batch=8, with_reference=True)
    # KV of its own beside the 3 common positions, when each token is made: 1, 2; 2 + 6 = 8; 8 - 5 + 6 = 9.
    read_s, prefill_s = 0.1 * 5, 0.01 * (3 + 1 + 6 + 6)
    assert work.count_s[0] == pytest.approx(prefill_s + 4 * 1.0 + read_s + 10.0 * 4 / 8)
    assert work.context_s[0] == pytest.approx(prefill_s + 4 * 1.0 + read_s + 10.0 * (1 + 2 + 8 + 9) / 12)
    assert work.latency_s[0] == pytest.approx(prefill_s + 4 * 11.0 + read_s)
    # Two sequences: 4 + 2 + 5 + 1 tokens, and 4 + 2 + 1 + 5 with 1 more.
    assert work.actor_s[0] == pytest.approx((12 + 13) * COST.actor_token_s)
    assert work.loss_tokens[0] == 4
    with pytest.raises(ConfigurationError, match="never fits 11"):
        demand([group_work(4, [forked])], cost, kv_tokens=11, max_batch=8, with_reference=True)
    more = trajectory_work([(2, 5, 0.0), (1, 5, 0.0)], forks={1: (6, 3)})  # of its own there are 2
    with pytest.raises(ConfigurationError, match="impossible turn"):
        demand([group_work(4, [more])], cost, kv_tokens=12, max_batch=8, with_reference=True)


def test_members_share_the_prompt_and_the_slowest_decides() -> None:
    quick, slow = trajectory_work([(1, 1, 0.0)], reset_s=0.0), trajectory_work([(1, 1, 50.0)], reset_s=2.0)
    both = demand([group_work(1001, [quick, slow])], COST, kv_tokens=2000, max_batch=8, with_reference=False)
    alone = demand([group_work(1001, [quick])], COST, kv_tokens=2000, max_batch=8, with_reference=False)
    token_s = COST.iteration_s + COST.sequence_s + COST.prefill_token_s
    prompt_s = 1000 * COST.prefill_token_s
    assert both.latency_s[0] == pytest.approx(prompt_s + token_s + 50.0)
    # The quick one's prompt is computed while the slow one is reset.
    assert both.start_latency_s[0] == pytest.approx(2.0 + token_s + 50.0)
    assert both.shortest_s[0] == pytest.approx(prompt_s + token_s)
    assert both.count_s[0] - alone.count_s[0] < prompt_s / 10
    assert both.reference_s[0] == 0.0


def test_without_staleness_everything_is_in_series() -> None:
    case = family("critical_path")
    have = replace(case.resources, sync_s=2.0, update_s=1.0)
    latency = np.sort(case.work.latency_s)[::-1][:: have.batch_groups].sum()
    trained = case.work.train_s.sum() / have.trainer_ranks
    expected = latency + trained + have.updates * 1.0 + (have.updates - 1) * 2.0
    assert closed_forms(case.work, have)["critical_path"] == pytest.approx(expected)
    assert clairvoyant_bound(case.work, have).seconds == pytest.approx(expected)


def test_batches_in_issue_order_wait_for_their_own_slowest() -> None:
    groups = [group_work(1, [trajectory_work([(1, 1, env_s)])]) for env_s in (100.0, 1.0, 100.0, 1.0)]
    have = Resources(2, 2, 0, 1, 1, 100, 8, update_s=0.5, sync_s=3.0)
    work = demand(groups, COST, kv_tokens=100, max_batch=8, with_reference=False)
    token_s = COST.iteration_s + COST.sequence_s + COST.prefill_token_s
    assert issue_order_seconds(work, have) == pytest.approx(2 * (100.0 + token_s + 0.5) + 3.0)
    # In another order both long ones meet.
    assert closed_forms(work, have)["critical_path"] == pytest.approx(101.0 + 2 * (token_s + 0.5) + 3.0)


@pytest.mark.parametrize("seed", range(40))
def test_the_exact_optimum_of_tiny_runs_is_never_below(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 3)
    tiny = Tiny(
        turns=tuple(
            tuple((rng.randint(1, 2), float(rng.choice((0, 1, 9)))) for _ in range(rng.randint(1, 2)))
            for _ in range(count)
        ),
        updates=2,
        max_staleness=seed % 2,
        iteration_s=2.0,
        sequence_s=1.0,
        train_token_s=rng.choice((0.0, 1.0)),
        update_s=rng.choice((0.0, 3.0)),
        sync_s=rng.choice((0.0, 4.0)),
        max_batch=rng.randint(1, 2),
    )
    best = optimum(tiny)
    bound = of_tiny(tiny)
    assert bound <= best * (1 + ROUNDING)
    if tiny.max_staleness == 0 and count == 2:
        assert bound == pytest.approx(best)  # one after the other: nothing is left to decide


def of_tiny(tiny: Tiny) -> float:
    cost = replace(
        COST,
        iteration_s=tiny.iteration_s,
        sequence_s=tiny.sequence_s,
        context_token_s=0.0,
        prefill_token_s=0.0,
        forward_token_s=tiny.train_token_s,
        backward_token_s=0.0,
    )
    groups = [group_work(1, [trajectory_work([(n, 1, env_s) for n, env_s in turns])]) for turns in tiny.turns]
    have = Resources(
        updates=tiny.updates,
        batch_groups=1,
        max_staleness=tiny.max_staleness,
        rollout_ranks=1,
        trainer_ranks=1,
        kv_tokens=1000,
        max_batch=tiny.max_batch,
        update_s=tiny.update_s,
        sync_s=tiny.sync_s,
        streaming=False,
    )
    work = demand(groups, cost, kv_tokens=1000, max_batch=tiny.max_batch, with_reference=False)
    return clairvoyant_bound(work, have).seconds


# ------------------------------------------------------------------------------------------- shape


MORE = {
    "rollout_ranks": lambda value: value + 1,
    "trainer_ranks": lambda value: value + 1,
    "kv_tokens": lambda value: 2 * value,
    "max_batch": lambda value: 2 * value,
    "max_staleness": lambda value: value + 1,
    "env_slots": lambda value: value + 2 if value else None,
    "link_s": lambda value: value / 2,
    "sync_s": lambda value: value / 2,
    "update_s": lambda value: value / 2,
}


@pytest.mark.parametrize("name", MORE)
def test_more_of_anything_never_raises_the_bound(name: str) -> None:
    for seed in range(25):
        case = random_case(seed)
        changes = {name: MORE[name](getattr(case.resources, name))}
        if case.resources.shared_ranks and name.endswith("_ranks"):
            changes = dict.fromkeys(("rollout_ranks", "trainer_ranks", "shared_ranks"), case.resources.ranks + 1)
        more = case.with_resources(**changes)
        assert more.bound.seconds <= case.bound.seconds * (1 + 1e-5), seed


def test_more_groups_to_choose_from_never_raise_the_bound() -> None:
    for seed in range(25):
        case = random_case(seed)
        fewer = replace(case, groups=case.groups[: case.resources.consumed_groups])
        assert case.bound.seconds <= fewer.bound.seconds * (1 + 1e-5), seed


def test_slower_everything_is_as_much_slower() -> None:
    for seed in range(20):
        case = random_case(seed)
        names = [name for name in case.cost.__dataclass_fields__ if name.endswith("_s")]
        cost = replace(case.cost, **{name: 3.0 * getattr(case.cost, name) for name in names})
        groups = tuple(
            replace(
                group,
                trajectories=tuple(
                    replace(
                        task,
                        reset_s=3.0 * task.reset_s,
                        turns=tuple(replace(turn, env_s=3.0 * turn.env_s) for turn in task.turns),
                    )
                    for task in group.trajectories
                ),
            )
            for group in case.groups
        )
        have = case.resources
        have = replace(have, update_s=3 * have.update_s, sync_s=3 * have.sync_s, link_s=3 * have.link_s)
        assert Case(groups, cost, have).bound.seconds == pytest.approx(3.0 * case.bound.seconds, rel=1e-5)


def test_the_order_of_groups_and_members_does_not_matter() -> None:
    for seed in range(20):
        case, rng = random_case(seed), random.Random(seed)
        shuffled = tuple(
            replace(group, trajectories=tuple(rng.sample(group.trajectories, len(group.trajectories))))
            for group in rng.sample(case.groups, len(case.groups))
        )
        assert replace(case, groups=shuffled).bound.seconds == pytest.approx(case.bound.seconds, rel=1e-5)


def test_goodput_and_its_ratios_follow_from_the_seconds() -> None:
    bound = family("trainer").bound
    assert bound.tokens_per_s == pytest.approx(bound.loss_tokens / bound.seconds)
    assert bound.rho(bound.tokens_per_s) == pytest.approx(1.0)
    assert bound.order_seconds >= bound.seconds
    assert bound.rho_order(bound.order_tokens_per_s) == pytest.approx(1.0)


def test_beyond_its_size_the_program_is_left_out_and_the_bound_says_so() -> None:
    case = family("rollout")
    many = LP_GROUP_UPDATES // case.resources.updates + 1
    large = replace(case, groups=(case.groups * many)[:many])
    bound = large.bound
    assert bound.lp_seconds is None and "closed forms only" in bound.method
    assert bound.seconds == max(bound.terms.values()) > 0


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rollout_ranks": 0}, "rollout_ranks"),
        ({"updates": 0}, "updates"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"sync_s": float("nan")}, "sync_s"),
        ({"update_s": -1.0}, "update_s"),
        ({"env_slots": 0}, "env_slots"),
    ],
)
def test_impossible_resources_are_refused(change: dict[str, float], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        family("rollout").with_resources(**change)


@pytest.mark.parametrize("env_s", [-1.0, float("nan")])
def test_impossible_seconds_are_refused(env_s: float) -> None:
    with pytest.raises(ConfigurationError, match="impossible turn"):
        demand([group_work(1, [trajectory_work([(1, 1, env_s)])])], COST, kv_tokens=9, max_batch=1, with_reference=True)


def test_a_trajectory_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="never fits 9 tokens"):
        demand([group_work(9, [trajectory_work([(2, 1, 0.0)])])], COST, kv_tokens=9, max_batch=1, with_reference=True)


def test_too_few_groups_and_none_at_all_are_refused() -> None:
    case = family("rollout")
    with pytest.raises(ConfigurationError, match="consume 64, given 63"):
        _ = replace(case, groups=case.groups[1:]).bound
    with pytest.raises(ConfigurationError, match="at least one group"):
        demand([], COST, kv_tokens=9, max_batch=1, with_reference=True)
