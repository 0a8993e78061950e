"""The KV book of a replica: I4, least-recently-used order, and reuse of equal ids under an equal version only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.data.errors import InvariantViolation
from tiderl.data.records import TaskKey
from tiderl.engines.residency import HeldKv, Residency, group_of


def task(number: int) -> TaskKey:
    return TaskKey("train", number, 0)


def held(tokens: int, version: int = 0) -> HeldKv:
    return HeldKv(np.arange(tokens, dtype=np.int32), version, None)


def book_holding(*tokens: int, budget_tokens: int = 100) -> Residency:
    """Tasks 0, 1, … hold these many tokens, task 0 the least recently used."""
    book = Residency(budget_tokens)
    for number, count in enumerate(tokens):
        book.reserve(task(number), count)
        book.settle(task(number), held(count))
    return book


def test_the_least_recently_used_is_evicted_first_and_no_more_than_needed() -> None:
    book = book_holding(30, 30, 30)
    book.touch(task(0))
    book.reserve(task(9), 35)  # 10 free: one eviction of 30 is enough
    assert list(book.held()) == [task(2), task(0)]
    assert book.committed_tokens == 95


def test_own_kv_is_handed_over_and_counted_once() -> None:
    book = book_holding(40, 50)
    own = book.reserve(task(0), 50)
    assert own is not None and own.tokens == 40
    assert book.committed_tokens == 100
    assert list(book.held()) == [task(1)]


def test_running_turns_are_never_evicted() -> None:
    book = Residency(100)
    book.reserve(task(0), 60)
    assert book.fits(40) and not book.fits(41)
    with pytest.raises(InvariantViolation):
        book.reserve(task(1), 41)


def test_a_reservation_is_freed_exactly_once() -> None:
    book = Residency(100)
    book.reserve(task(0), 60)
    with pytest.raises(InvariantViolation):
        book.reserve(task(0), 10)
    book.settle(task(0), None)
    with pytest.raises(InvariantViolation):
        book.settle(task(0), None)
    assert book.committed_tokens == 0


def test_a_turn_cannot_hold_more_than_it_reserved() -> None:
    book = Residency(100)
    book.reserve(task(0), 5)
    with pytest.raises(InvariantViolation):
        book.settle(task(0), held(6))


@pytest.mark.parametrize(
    ("ids", "version", "usable"),
    [([0, 1, 2, 3, 9], 0, 4), ([0, 1, 7], 0, 2), ([5, 1, 2, 3], 0, 0), ([0, 1], 0, 2), ([0, 1, 2, 3], 1, 0)],
)
def test_kv_is_usable_for_the_common_prefix_of_its_own_version(ids: list[int], version: int, usable: int) -> None:
    assert held(4).usable_tokens(np.array(ids, dtype=np.int32), version) == usable


def test_a_turn_grows_by_evicting_waiting_tasks_and_never_past_the_budget() -> None:
    book = book_holding(30, 30)
    book.reserve(task(9), 40)
    assert book.grow(task(9), 60)  # 30 of task 0 make room
    assert list(book.held()) == [task(1)] and book.committed_tokens == 90
    book.reserve(task(8), 10)
    assert not book.grow(task(9), 91)  # 10 are reserved
    assert book.committed_tokens == 100
    assert book.grow(task(9), 90) and book.committed_tokens == 100 and not book.held()


def test_a_groups_prompt_is_held_once_and_evictable_like_any_entry() -> None:
    book = Residency(100)
    group = group_of(task(0))
    book.keep_prefix(group, held(30))
    book.keep_prefix(group, held(20))  # replaces
    assert book.prefixes() == [group] and book.committed_tokens == 20
    assert [entry.tokens for entry in book.held_by_group(group)] == [20]
    book.reserve(task(1), 85)
    assert book.prefixes() == [] and book.committed_tokens == 85
    with pytest.raises(InvariantViolation):
        book.keep_prefix(group, held(16))


def test_members_of_a_group_find_what_the_others_hold() -> None:
    book = Residency(100)
    for number, member, tokens in ((0, 0, 10), (0, 1, 20), (1, 0, 30)):
        book.reserve(TaskKey("train", number, member), tokens)
        book.settle(TaskKey("train", number, member), held(tokens))
    assert sorted(entry.tokens for entry in book.held_by_group(group_of(task(0)))) == [10, 20]
    book.drop(TaskKey("train", 0, 0))
    assert [entry.tokens for entry in book.held_by_group(group_of(task(0)))] == [20]
    book.drop_all_held()
    assert list(book.held_by_group(group_of(task(1)))) == []


class OverbookingResidency(Residency):
    """Mutant for I4: forgets what running turns reserved."""

    def fits(self, tokens: int) -> bool:
        return tokens <= self.budget_tokens

    def reserve(self, task: TaskKey, tokens: int) -> HeldKv | None:
        if tokens + self.committed_tokens > self.budget_tokens:
            self.drop_all_held()
        self._reserved[task] = tokens
        self._reserved_tokens += tokens
        return self.drop(task)


def committed_stays_within_budget(book: Residency, operations: list[tuple[int, int]]) -> bool:
    """Start, grow and end turns as a replica would; compare the running sums with a recount each time."""
    running: dict[int, int] = {}
    for number, tokens in operations:
        if number in running and tokens > running[number]:
            if book.grow(task(number), tokens):
                running[number] = tokens
        elif number in running:
            book.settle(task(number), held(running.pop(number)))
        elif book.fits(tokens):
            book.reserve(task(number), tokens)
            running[number] = tokens
        recount = sum(running.values()) + sum(book.held().values())
        assert recount == book.committed_tokens
        if recount > book.budget_tokens:
            return False
    return True


OPERATIONS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=40)


@settings(deadline=None, derandomize=True)
@given(OPERATIONS)
def test_committed_never_exceeds_the_budget(operations: list[tuple[int, int]]) -> None:
    assert committed_stays_within_budget(Residency(100), operations)


def test_the_budget_test_catches_overbooking() -> None:
    assert not committed_stays_within_budget(OverbookingResidency(100), [(0, 60), (1, 60)])


# ---- the task as the unit


def test_by_task_the_lowest_priority_goes_first_then_the_least_recently_used() -> None:
    book = Residency(100, "ctb")
    for number, priority in enumerate((1.0, 0.0, 0.0, 2.0)):
        book.reserve(task(number), 25)
        book.settle(task(number), held(25), priority)
    book.touch(task(1))
    for more, left in ((20, [0, 3, 1]), (26, [0, 3]), (51, [3])):
        book.reserve(task(9), more)
        assert list(book.held()) == [task(number) for number in left]
        book.settle(task(9), None)
    assert book.evicted_tokens == 75
    assert [owner for owner, _ in book.take_evicted()] == [task(2), task(1), task(0)]
    assert book.take_evicted() == []


def test_by_task_a_kept_prompt_goes_before_any_task() -> None:
    book = Residency(100, "ctb")
    book.reserve(task(0), 40)
    book.settle(task(0), held(40), -5.0)
    book.keep_prefix(group_of(task(1)), held(40))
    book.reserve(task(9), 30)
    assert list(book.held()) == [task(0)] and book.evicted_tokens == 0 and book.take_evicted() == []


def test_the_next_turn_says_what_a_held_task_is_worth() -> None:
    book = Residency(100, "ctb")
    for number in range(2):
        book.reserve(task(number), 40)
        book.settle(task(number), held(40), 1.0)
    book.touch(task(0), 0.0)  # now the most recently used, but of less priority
    book.reserve(task(9), 30)
    assert list(book.held()) == [task(1)]


def test_at_request_level_priority_protects_nothing() -> None:
    book = Residency(100)
    for number, priority in enumerate((5.0, 0.0)):
        book.reserve(task(number), 40)
        book.settle(task(number), held(40), priority)
    book.reserve(task(9), 30)
    assert list(book.held()) == [task(1)] and book.evicted_tokens == 40 and book.take_evicted() == []


STEPS = st.lists(
    st.tuples(st.integers(0, 7), st.integers(1, 60), st.integers(0, 2), st.sampled_from(["turn", "touch", "drop"])),
    max_size=40,
)


@settings(deadline=None, derandomize=True)
@given(STEPS)
def test_by_task_nobody_goes_while_someone_of_less_worth_stays(steps: list[tuple[int, int, int, str]]) -> None:
    """Against a list of (priority, moment of use, task, tokens) that is sorted again at every turn."""
    book = Residency(100, "ctb")
    waiting: list[tuple[int, int, int, int]] = []
    for moment, (number, tokens, priority, what) in enumerate(steps):
        mine = [entry for entry in waiting if entry[2] == number]
        if what == "touch":
            book.touch(task(number), float(priority))
            waiting = [entry for entry in waiting if entry not in mine]
            waiting += [(priority, moment, number, entry[3]) for entry in mine]
            continue
        waiting = [entry for entry in waiting if entry not in mine]
        if what == "drop":
            assert (book.drop(task(number)) is not None) == bool(mine)
            continue
        book.reserve(task(number), tokens)
        waiting.sort()
        while sum(entry[3] for entry in waiting) + tokens > 100:
            del waiting[0]
        book.settle(task(number), held(tokens), float(priority))
        waiting.append((priority, moment, number, tokens))
        assert {owner.prompt_id: count for owner, count in book.held().items()} == {n: t for _, _, n, t in waiting}
