"""Members that wait for a place: in their order, by replica, and gone with their group."""

from __future__ import annotations

from tiderl.data.records import Prompt
from tiderl.runtime.buffer import Group, Member
from tiderl.runtime.waiting import Waiting


def group_of(prompt_id: int, opened_on: int | None, members: int = 2) -> Group:
    found = [Member(number, 10 * prompt_id + number) for number in range(members)]
    return Group(prompt_id, Prompt("p"), 0, 0, found, opened_on=opened_on)


def test_members_leave_in_the_order_in_which_they_came_and_by_the_replica_of_their_group() -> None:
    waiting = Waiting()
    first, second, nowhere = group_of(1, 0), group_of(2, 1), group_of(3, None, members=1)
    for group in (first, second, nowhere):
        waiting.add(group, group.members)
    assert len(waiting) == 5
    assert waiting.first() == waiting.first(0) == (first, first.members[0])
    assert waiting.take(1) == (second, second.members[0])
    assert waiting.first() == (first, first.members[0]), "who was taken from a replica was not the first"
    assert waiting.take() == (first, first.members[0])
    assert waiting.first(0) == waiting.first() == (first, first.members[1]), "gone from its replica too"
    assert [waiting.take() for _ in range(3)] == [
        (first, first.members[1]),
        (second, second.members[1]),
        (nowhere, nowhere.members[0]),
    ]
    assert waiting.first() is waiting.first(0) is waiting.first(1) is waiting.first(7) is None


def test_who_starts_again_goes_first_and_a_group_that_is_given_up_leaves() -> None:
    waiting = Waiting()
    first, second = group_of(1, 0, members=1), group_of(2, 0)
    waiting.add(first, first.members)
    waiting.add(second, second.members[1:])
    waiting.add_first(second, second.members[0])
    assert waiting.first() == waiting.first(0) == (second, second.members[0])
    waiting.forget(second)
    assert len(waiting) == 1
    assert waiting.first() == waiting.first(0) == (first, first.members[0])
