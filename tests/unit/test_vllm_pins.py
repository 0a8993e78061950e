"""Which pins go first, without vLLM."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.engines.vllm_pins import Pin, Pins, may_help


def pins_of(*entries: tuple[str, float]) -> Pins[int]:
    pins: Pins[int] = Pins()
    for number, (task, priority) in enumerate(entries):
        pins.put(task, Pin((number,), priority))
    return pins


def test_the_lowest_priority_goes_first_then_the_longest_unused() -> None:
    pins = pins_of(("a", 1.0), ("b", 0.0), ("c", 1.0), ("d", 0.0))
    assert list(pins.victims()) == ["b", "d", "a", "c"]
    pins.touch("b")
    assert list(pins.victims()) == ["d", "b", "a", "c"]


def test_a_queued_turn_gives_its_pin_the_new_priority() -> None:
    pins = pins_of(("a", 0.0), ("b", 1.0))
    pins.touch("a", 2.0)
    assert list(pins.victims()) == ["b", "a"]


def test_who_asks_for_room_loses_its_own_pin_last() -> None:
    pins = pins_of(("a", -5.0), ("b", 0.0), ("c", 9.0))
    assert list(pins.victims(last="a")) == ["b", "c", "a"]
    assert list(pins.victims(last="unknown")) == ["a", "b", "c"]


def test_touching_what_is_not_pinned_pins_nothing() -> None:
    pins = pins_of(("a", 0.0))
    pins.touch("b", 3.0)
    assert list(pins.victims()) == ["a"] and "b" not in pins


def test_a_second_pin_of_a_task_is_a_mistake() -> None:
    pins = pins_of(("a", 0.0))
    with pytest.raises(AssertionError):
        pins.put("a", Pin((1,), 0.0))


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "take", "touch"]), st.sampled_from("abcd"), st.sampled_from([-1.0, 0.0, 1.0]))
)


@given(OPERATIONS, st.sampled_from(["", "a", "b"]))
def test_victims_are_all_pins_once_in_order(operations: list[tuple[str, str, float]], last: str) -> None:
    """Against the slow way: a list of (task, priority) in order of use, searched for the least each time."""
    pins: Pins[int] = Pins()
    used: list[tuple[str, float]] = []
    for kind, task, priority in operations:
        old = dict(used).get(task)
        used = [entry for entry in used if entry[0] != task] if kind != "touch" or old is not None else used
        if kind == "put":
            pins.take(task)
            pins.put(task, Pin((0,), priority))
            used.append((task, priority))
        elif kind == "take":
            assert (pins.take(task) is None) == (old is None)
        else:
            pins.touch(task)
            if old is not None:
                used.append((task, old))
    expected = []
    left = [entry for entry in used if entry[0] != last]
    while left:
        least = min(priority for _, priority in left)
        first = next(entry for entry in left if entry[1] == least)
        expected.append(first[0])
        left.remove(first)
    expected += [task for task, _ in used if task == last]
    assert list(pins.victims(last=last)) == expected
    assert len(pins) == len(used)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_help_is_ruled_out_only_when_all_pins_would_not_do(need: int, free: int, pinned: int) -> None:
    assert may_help(need, free, pinned) == (need <= free + pinned)
