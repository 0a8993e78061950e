"""Who comes first: the keys of each rule by hand, weights that are refused, and the order that follows the keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.data.records import TaskKey
from tiderl.schedule.order import Ranked, Ready
from tiderl.schedule.priority import STANDARD, TaskFacts, Weights, priority
from tiderl.schedule.residents import Resident

HALF = TaskFacts(group_done_fraction=0.5, active=True, context_fraction=0.25)


def test_the_tiers_are_compared_one_after_the_other() -> None:
    assert priority(HALF) == (0.0, 0.5, 1.0, 0.25)
    facts = [
        TaskFacts(context_fraction=1.0),
        TaskFacts(active=True),
        TaskFacts(group_done_fraction=0.01),
        TaskFacts(evaluation=True),
        TaskFacts(evaluation=True, context_fraction=0.1),
    ]
    keys = [priority(f) for f in facts]
    assert keys == sorted(keys), "each counts more than all behind it together"


def test_weights_sum_up() -> None:
    assert priority(HALF, "weighted") == (4 * 0.5 + 2 + 0.25,)
    assert priority(HALF, "weighted", Weights(1.0, 0.0, 3.0, 8.0)) == (3.0 + 2.0,)
    assert priority(TaskFacts(evaluation=True), "weighted", Weights(5.0)) == (5.0,)
    assert (STANDARD.evaluation, STANDARD.group, STANDARD.active, STANDARD.context) == (8.0, 4.0, 2.0, 1.0)


@pytest.mark.parametrize("name", ["evaluation", "group", "active", "context"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5])
def test_weights_that_order_nothing_are_refused_in_one_line(name: str, value: float) -> None:
    with pytest.raises(ValueError) as caught:
        Weights(**{name: value})
    assert str(caught.value) == f"the weight of {name} is {value}: it must be a number of at least 0"


def test_deadlines_come_first_earliest_first_then_the_groups_work() -> None:
    def key(now_s: float = 100.0, **facts: object) -> tuple[float, ...]:
        return priority(TaskFacts(**facts), "deadlines", now_s=now_s)  # type: ignore[arg-type]

    evaluation = key(evaluation=True)
    urgent, late = key(latest_start_s=-5.0), key(latest_start_s=100.0)
    in_time = key(latest_start_s=100.5, remaining_tokens=70.0, context_fraction=0.5)
    assert evaluation > urgent > late > in_time
    assert in_time == (0.0, -70.0, 0.5)
    short, long = (key(remaining_tokens=tokens) for tokens in (10.0, 20.0))
    assert short > long, "the trainer starves: what is ready soonest"
    short, long = (key(remaining_tokens=tokens, starving=False) for tokens in (10.0, 20.0))
    assert long > short, "it has enough: what takes longest"
    assert key(now_s=101.0, latest_start_s=100.5) > long


# --- the order


class Tasks:
    """Residents whose priorities can be set."""

    def __init__(self, count: int) -> None:
        self.ranks: dict[TaskKey, float] = {}
        keys = [TaskKey("train", 0, number) for number in range(count)]
        self.residents = [Resident(key, "train:web", 0, lambda resident, now_s: TaskFacts()) for key in keys]

    def rank(self, resident: Resident, now_s: float) -> tuple[float, ...]:
        return (self.ranks[resident.key],)

    def set(self, ranks: Sequence[float]) -> None:
        self.ranks = {resident.key: rank for resident, rank in zip(self.residents, ranks, strict=True)}


RANKS = st.lists(st.integers(0, 4), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ranks=RANKS, lowest=st.booleans(), gone=st.sets(st.integers(0, 11)))
def test_ranked_tasks_leave_in_their_order(ranks: list[int], lowest: bool, gone: set[int]) -> None:
    tasks = Tasks(len(ranks))
    tasks.set(ranks)
    ranked = Ranked(tasks.rank, lowest=lowest)
    for resident in tasks.residents:
        ranked.add(resident, 0.0)
    for number in gone & set(range(len(ranks))):
        ranked.discard(tasks.residents[number])
    left = [number for number in range(len(ranks)) if number not in gone]
    expected = sorted(left, key=lambda number: (ranks[number] if lowest else -ranks[number], number))
    found = []
    while (first := ranked.first(0.0)) is not None:
        found.append(first.key.member)
        ranked.discard(first)
    assert found == expected
    assert len(ranked) == 0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ranks=RANKS, later=st.data())
def test_a_changed_priority_counts_at_once_when_it_fell_and_soon_when_it_rose(
    ranks: list[int], later: st.DataObject
) -> None:
    tasks = Tasks(len(ranks))
    tasks.set(ranks)
    ranked = Ranked(tasks.rank)
    for resident in tasks.residents:
        ranked.add(resident, 0.0)
    fell = [later.draw(st.integers(0, rank)) for rank in ranks]
    tasks.set(fell)
    first = ranked.first(0.0)
    assert first is not None and tasks.ranks[first.key] == max(fell)
    rose = [later.draw(st.integers(0, 9)) for _ in ranks]
    tasks.set(rose)
    for _ in range(len(ranks) + 1):  # as many decisions as there are tasks
        first = ranked.first(0.0)
    assert first is not None and tasks.ranks[first.key] == max(rose)


def test_one_can_be_left_out_and_the_others_stay_in_order() -> None:
    tasks = Tasks(3)
    tasks.set([2, 1, 2])
    ranked = Ranked(tasks.rank)
    for resident in tasks.residents:
        ranked.add(resident, 0.0)
    assert ranked.first(0.0, but=tasks.residents[0]) is tasks.residents[2]
    seen: list[int] = []

    def look(resident: Resident) -> bool:
        seen.append(resident.key.member)
        return False

    assert list(ranked.passing(tasks.residents[1], look, misses=1)) == [] and seen == [0]
    seen.clear()
    assert list(ranked.passing(tasks.residents[2], look, misses=9)) == [] and seen == [0, 1]
    ranked.discard(tasks.residents[2])
    ranked.discard(tasks.residents[1])
    assert ranked.first(0.0, but=tasks.residents[0]) is None


def test_who_waits_beyond_the_patience_goes_first_wherever_it_has_waited() -> None:
    tasks = Tasks(3)
    tasks.set([0, 1, 2])
    ready = Ready(tasks.rank, patience_s=3.0)
    for resident, since_s in zip(tasks.residents, (0.1, 0.2, 0.1), strict=True):
        resident.ready_s = since_s
        ready.add(resident, since_s)
    assert [resident.key.member for resident in ready.oldest()] == [0, 2, 1]
    assert ready.head(0.1 + 2.9) == (tasks.residents[2], False)
    assert ready.head(ready.aged_s) == (tasks.residents[0], True), "at the moment that was promised, however it rounds"
    ready.discard(tasks.residents[0])
    assert ready.head(3.15) == (tasks.residents[2], True)
    assert list(ready.behind(tasks.residents[2], lambda resident: False)) == []
    assert next(ready.behind(tasks.residents[2], lambda resident: True)) is tasks.residents[1]
