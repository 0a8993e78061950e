"""Who starts, who grows and who gives way, without a model."""

from __future__ import annotations

from support.tiny_models import turn

from tiderl.engines.admission import GROWTH_TOKENS, Admission
from tiderl.engines.growth import FIRST_TURNS, REMEMBERED_TURNS, Growth
from tiderl.engines.live_turn import LiveTurn
from tiderl.engines.residency import Residency


def live(number: int, context_tokens: int, max_new_tokens: int, priority: float = 0.0) -> LiveTurn:
    return LiveTurn(turn(number, range(context_tokens), max_new_tokens, priority=priority), number, 0.0)


def sample(one: LiveTurn, tokens: int) -> None:
    for _ in range(tokens):
        one.append(5, -1.0, 0, 0.0)


def numbers(lives: list[LiveTurn]) -> list[int]:
    return [one.turn.task.prompt_id for one in lives]


def taught(budget_tokens: int) -> Admission:
    """It has seen only turns of one token out of 20."""
    admission = Admission(Residency(budget_tokens), 0.8)
    for n in range(FIRST_TURNS):
        one = live(n, 2, 20)
        sample(one, 1)
        admission.ended(one)
    return admission


def test_the_first_that_does_not_fit_holds_back_the_rest() -> None:
    admission = Admission(Residency(30), 0.8)
    for one in (live(0, 5, 10), live(1, 10, 10), live(2, 1, 1)):
        admission.push(one)
    assert numbers(admission.admit(8, 0.0)) == [0]  # 15 reserved; 20 do not fit, and 2 would


def test_larger_priority_then_arrival_and_only_free_rows() -> None:
    admission = Admission(Residency(1000), 0.8)
    lives = [live(n, 5, 5, priority) for n, priority in enumerate((0.0, 2.0, 0.0, 2.0))]
    for one in lives:
        admission.push(one)
    admission.withdraw(lives[3])
    admission.withdraw(lives[3])
    assert numbers(admission.admit(2, 0.0)) == [1, 0]
    assert numbers(admission.admit(2, 0.0)) == [2]


def test_growth_is_asked_for_in_steps_up_to_the_need() -> None:
    admission = taught(100)
    one = live(0, 10, 40)
    admission.push(one)
    admission.admit(1, 0.0)
    assert one.reserved_tokens == 10 + 2  # 1/20 of 40
    sample(one, 2)
    assert admission.make_room([one]) == [] and one.reserved_tokens == 12
    sample(one, 1)
    assert admission.make_room([one]) == [] and one.reserved_tokens == 12 + GROWTH_TOKENS
    sample(one, 36)
    for _ in range(2):
        admission.make_room([one])
    assert one.reserved_tokens == 50 == admission.residency.committed_tokens


def test_the_most_junior_gives_way_and_comes_back_to_its_place_with_all_it_may_need() -> None:
    admission = taught(60)
    lives = [live(n, 18, 20, priority) for n, priority in enumerate((1.0, 0.0, 0.0))]
    for one in lives:
        admission.push(one)
    assert numbers(admission.admit(8, 0.0)) == [0, 1, 2]  # 19 each
    sample(lives[0], 2)
    assert numbers(admission.make_room(lives)) == [2]
    assert admission.residency.committed_tokens == 19 + GROWTH_TOKENS + 19
    admission.push(live(9, 1, 1))
    assert admission.admit(8, 0.0) == []  # task 2 is before task 9 and needs 38
    admission.residency.settle(lives[0].turn.task, None)
    assert numbers(admission.admit(8, 0.0)) == [2, 9]
    assert lives[2].reserved_tokens == lives[2].need_tokens == 38


def test_a_junior_turn_that_cannot_grow_gives_way_itself() -> None:
    admission = taught(40)
    lives = [live(0, 18, 20), live(1, 18, 20)]
    for one in lives:
        admission.push(one)
    admission.admit(8, 0.0)
    sample(lives[1], 2)
    assert numbers(admission.make_room(lives)) == [1]
    assert admission.preemptions == lives[1].preemptions == 1 and lives[1].sampled_tokens == 2


def test_the_most_senior_always_progresses() -> None:
    """Eight turns that each may need the whole budget all end: no two push each other out for ever."""
    admission = taught(40)
    lives = [live(n, 10, 30) for n in range(8)]
    for one in lives:
        admission.push(one)
    running: list[LiveTurn] = []
    ended = 0
    for _ in range(8 * 30 * 2):
        for one in admission.make_room(running):
            running.remove(one)
        running += admission.admit(8 - len(running), 0.0)
        assert all(one.length <= one.reserved_tokens for one in running)
        for one in list(running):
            if one.append(5, -1.0, 0, 0.0):
                running.remove(one)
                admission.residency.settle(one.turn.task, None)
                ended += 1
    assert ended == 8 and admission.residency.committed_tokens == 0


def test_growth_is_a_quantile_of_recent_turns() -> None:
    growth = Growth(0.8)
    assert growth.expect(50) == 50
    for n in range(1, 11):
        growth.observe(n, 20)
    assert growth.expect(50) == 50  # too few to tell
    for n in range(11, 21):
        growth.observe(n, 20)
    assert growth.expect(100) == 80  # 16 of 20 turns used at most 16/20
    assert growth.expect(1) == 1
    for _ in range(REMEMBERED_TURNS):
        growth.observe(1, 100)
    assert growth.expect(100) == 1 == growth.expect(20)
    assert Growth(1.0).expect(7) == 7
