"""The small decisions: failures, placement, admission, shaping, signals, the registry of strategies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.data.errors import ConfigurationError
from tiderl.schedule import strategy
from tiderl.schedule.groups import FailureView, after_failure
from tiderl.schedule.pipeline import shape_micro_batches, split_parts
from tiderl.schedule.signals import ReadinessSignals, head_of_line_s, ready_microbatches
from tiderl.schedule.staleness import StartView
from tiderl.schedule.tasks import Admission, AdmissionView, Blocked, ReplicaView, next_admission, place


@pytest.mark.parametrize(
    ("view", "verdict"),
    [
        (FailureView("environment", retries=0, group_refills=0), "retry"),
        (FailureView("environment", retries=1, group_refills=0), "refill"),
        (FailureView("environment", retries=1, group_refills=2), "refill"),
        (FailureView("environment", retries=1, group_refills=3), "drop_group"),
        (FailureView("verifier", retries=0, group_refills=0), "refill"),
        (FailureView("verifier", retries=0, group_refills=3), "drop_group"),
        (FailureView("infrastructure", retries=9, group_refills=9), "refill"),
    ],
)
def test_failures_follow_the_table(view, verdict) -> None:
    assert after_failure(view) == verdict


def test_place_takes_the_least_loaded_that_is_new_enough() -> None:
    replicas = [ReplicaView(0, version=1, tasks=0), ReplicaView(1, version=2, tasks=5), ReplicaView(2, 3, tasks=5)]
    assert place(replicas, min_version=2) == 1
    assert place(replicas, min_version=3, exact=True) == 2
    assert place(replicas, min_version=4) is None


def view(**changes) -> AdmissionView:
    values = {
        "free_slots": 4,
        "replicas": [ReplicaView(0, version=0, tasks=0)],
        "eval_version": None,
        "member_min_version": None,
        "start": StartView(started_groups=0, total_groups=8, global_batch_groups=2, max_staleness=1),
        "replica_slots": 10,
    }
    return AdmissionView(**{**values, **changes})


def test_evaluation_goes_before_members_before_groups() -> None:
    assert next_admission(view(eval_version=0, member_min_version=0)) == Admission("eval", 0)
    assert next_admission(view(member_min_version=0)) == Admission("member", 0)
    assert next_admission(view()) == Admission("group", 0)


def test_evaluation_runs_on_its_version_only() -> None:
    assert next_admission(view(eval_version=1, member_min_version=0)) == Admission("member", 0)


def test_a_member_never_starts_on_an_older_version_than_its_group() -> None:
    full = StartView(4, total_groups=8, global_batch_groups=2, max_staleness=1)
    assert next_admission(view(member_min_version=1, start=full)) == Blocked("staleness")


def test_what_blocks_is_named() -> None:
    assert next_admission(view(free_slots=0)) == Blocked("slots")
    assert next_admission(view(replicas=[])) == Blocked("weights")
    assert next_admission(view(start=StartView(8, 8, 2, 1))) == Blocked("done")


def test_a_group_starts_where_the_bucket_of_that_version_allows() -> None:
    replicas = [ReplicaView(0, version=0, tasks=0), ReplicaView(1, version=1, tasks=9)]
    start = StartView(started_groups=4, total_groups=8, global_batch_groups=2, max_staleness=1)
    assert next_admission(view(replicas=replicas, start=start)) == Admission("group", 1)


@pytest.mark.parametrize("waits", [{}, {"member_min_version": 1}, {"eval_version": 1}])
def test_the_first_replica_with_a_new_version_takes_no_more_than_its_part(waits) -> None:
    """The others load it a moment later. Without parts it would take all that wait for the version."""
    start = StartView(started_groups=4, total_groups=8, global_batch_groups=2, max_staleness=1)
    first = {"replicas": [ReplicaView(0, version=0, tasks=0), ReplicaView(1, version=1, tasks=4)], "start": start}
    assert next_admission(view(**first, **waits, replica_slots=4)) == Blocked("slots")
    assert isinstance(next_admission(view(**first, **waits, replica_slots=5)), Admission)
    second = {**first, "replicas": [ReplicaView(0, version=1, tasks=0), ReplicaView(1, version=1, tasks=4)]}
    admitted = next_admission(view(**second, **waits, replica_slots=4))
    assert isinstance(admitted, Admission) and admitted.replica == 0


@pytest.mark.parametrize(("ahead", "to"), [(0, 0), (2, 0), (3, 1)])
def test_a_replica_with_the_groups_prompt_is_preferred_up_to_an_eighth_more_tasks(ahead, to) -> None:
    replicas = [ReplicaView(0, version=0, tasks=16 + ahead), ReplicaView(1, version=0, tasks=16)]
    assert place(replicas, min_version=0, home=0, home_lead=8) == to
    assert place(replicas, min_version=0, home=0, home_lead=1) == int(ahead > 1), "nor more than it may"


def test_where_memory_says_how_many_turns_run_the_groups_prompt_decides() -> None:
    replicas = [ReplicaView(0, 0, tasks=9), ReplicaView(1, 0, tasks=2, pressed=True)]
    assert place(replicas, min_version=0, home=0, home_lead=8) == 0
    replicas[1] = ReplicaView(1, 0, tasks=2)
    assert place(replicas, min_version=0, home=0, home_lead=8) == 1, "the least loaded one has room"


def test_a_member_waits_for_its_prompts_replica_while_others_have_something_else_to_do() -> None:
    def decided(home_room: set[str], other_room: set[str], **changes: object) -> Admission | Blocked:
        replicas = [ReplicaView(0, 0, 2, frozenset(home_room)), ReplicaView(1, 0, 2, frozenset(other_room))]
        return next_admission(view(replicas=replicas, member_min_version=0, member_home=0, home_lead=8, **changes))

    full = StartView(started_groups=4, total_groups=8, global_batch_groups=2, max_staleness=1)
    assert decided({"member"}, {"member", "own", "group"}) == Admission("member", 0)
    assert decided(set(), {"member", "own"}) == Admission("own", 1), "a member of a group that was opened there"
    assert decided(set(), {"member", "group"}) == Admission("group", 1), "or a new group"
    assert decided(set(), {"member"}) == Admission("member", 1), "nothing waits for a replica while another has room"
    assert decided(set(), {"member", "group"}, start=full) == Admission("member", 1), "no group may start"
    assert decided(set(), {"own"}) == Admission("own", 1)
    assert decided({"own"}, set()) == Admission("own", 0)
    assert decided(set(), set()) == Blocked("kv")
    away = [ReplicaView(1, 0, 2, frozenset({"member", "group"})), ReplicaView(2, 0, 2, frozenset({"group"}))]
    assert next_admission(view(replicas=away, member_min_version=0, member_home=0)) == Admission("member", 1)


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(50, 400))
def test_micro_batches_hold_every_sequence_once_and_keep_the_budget(lengths, budget) -> None:
    batches = shape_micro_batches(lengths, budget)
    assert [i for batch in batches for i in batch] == list(range(len(lengths)))  # a group's members stay together
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= budget


def test_micro_batches_by_hand() -> None:
    # In order: 30 + 50 leave no room for 30 more, 30 + 10 + 50 are 90, 120 is alone, then what is left.
    assert shape_micro_batches([30, 50, 30, 10, 50, 120, 30], 100) == ((0, 1), (2, 3, 4), (5,), (6,))


def test_parts_divide_the_batch_in_order() -> None:
    assert split_parts(8, 2) == (range(4), range(4, 8))
    assert split_parts(3, 1) == (range(3),)


def test_tprm_is_smoothed_and_grows_while_nothing_arrives() -> None:
    signals = ReadinessSignals(micro_batch_tokens=100)
    assert signals.time_per_ready_microbatch_s(0.0) is None
    signals.observe(1.0, 100)
    signals.observe(3.0, 50)  # half a micro-batch: no arrival yet
    signals.observe(4.0, 50)
    assert signals.time_per_ready_microbatch_s(4.0) == pytest.approx(3.0)
    signals.observe(5.0, 100)
    assert signals.time_per_ready_microbatch_s(5.0) == pytest.approx(3.0 + 0.2 * (1.0 - 3.0))
    assert signals.time_per_ready_microbatch_s(15.0) == pytest.approx(10.0)


def test_tprm_divides_an_arrival_of_several_micro_batches() -> None:
    signals = ReadinessSignals(micro_batch_tokens=100)
    signals.observe(0.0, 100)
    signals.observe(8.0, 400)
    assert signals.time_per_ready_microbatch_s(8.0) == pytest.approx(2.0)


def test_ras_counts_whole_micro_batches_and_hol_is_the_oldest() -> None:
    assert ready_microbatches(4095, 4096) == 0
    assert ready_microbatches(8200, 4096) == 2
    assert head_of_line_s(10.0, [7.5, 9.0]) == pytest.approx(2.5)
    assert head_of_line_s(10.0, []) == 0.0


def test_registry_holds_the_built_strategies() -> None:
    built = strategy.registry()
    assert list(built) == ["sync", "areal"]
    assert built["sync"].max_staleness == 0
    assert built["areal"].loss == "decoupled_ppo"


@pytest.mark.parametrize(("name", "words"), [("tide", "not yet supported"), ("arael", "did you mean 'areal'")])
def test_other_strategies_are_refused_by_name(name, words) -> None:
    with pytest.raises(ConfigurationError, match=words):
        strategy.get(name)
