"""The pool of a replica, rule by rule, with values by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pool_play import CONTEXT, MAX_TURNS, admitted, of_kind, pool_of, train

from tiderl.data.errors import InvariantViolation, RequestTooLarge
from tiderl.data.records import TaskKey
from tiderl.schedule.charges import Charges
from tiderl.schedule.order import CANDIDATES
from tiderl.schedule.pool import BATCHES, TaskPool, Verdict
from tiderl.schedule.priority import TaskFacts
from tiderl.schedule.residents import Resident


def turn(pool: TaskPool, key: TaskKey, context: int, said: int, now_s: float) -> None:
    """A whole turn, which had room."""
    assert key in pool.ask(key, context, said, now_s).go
    pool.ended(key, context + said, said, now_s)


def test_a_turn_that_no_pool_can_hold_is_refused_and_changes_nothing() -> None:
    pool = pool_of(64, block_tokens=16)
    admitted(pool, train(0))
    with pytest.raises(RequestTooLarge, match="a turn of 65 tokens never fits 64 tokens of KV"):
        pool.ask(train(0), 60, 5, 0.0)
    assert pool.ask(train(0), 60, 4, 0.0).go == (train(0),)
    assert pool.used_tokens == 64


def test_events_that_cannot_be_are_refused() -> None:
    pool = pool_of(128)
    admitted(pool, train(0))
    with pytest.raises(InvariantViolation, match="in flight already"):
        admitted(pool, train(0))
    with pytest.raises(InvariantViolation, match="did not run"):
        pool.ended(train(0), 10, 1, 0.0)
    pool.ask(train(0), 20, 5, 0.0)
    with pytest.raises(InvariantViolation, match="asks for a turn and is active"):
        pool.ask(train(0), 20, 5, 0.0)
    with pytest.raises(InvariantViolation, match="is active and does not wait for room"):
        pool.transfer(train(0), pool_of(128), 0.0)


def test_what_a_group_begins_with_is_charged_once_on_each_replica() -> None:
    pools = [pool_of(192, block_tokens=4, shares_prompts=True) for _ in range(2)]
    for number, pool in enumerate(pools):
        admitted(pool, *(train(member) for member in range(3 - number)))
        for member in range(3 - number):
            pool.ask(train(member), 42, 6, 0.0)
    # Of 42 tokens 40 are whole blocks without the last; beside them each has 8 positions, two blocks.
    assert [pool.used_tokens for pool in pools] == [40 + 3 * 8, 40 + 2 * 8]
    pools[0].leave(train(0), finished=True)
    pools[0].leave(train(1), finished=True)
    assert pools[0].used_tokens == 40 + 8
    pools[0].leave(train(2), finished=True)
    assert [pool.used_tokens for pool in pools] == [0, 40 + 2 * 8]


def opened(pool: TaskPool, number: int, cached: int, *, first: int = 42, ids: np.ndarray | None = None) -> None:
    """A group's only member so far has done its first turn, `cached` tokens of which were there. It says 2."""
    admitted(pool, train(0, number))
    assert pool.ask(train(0, number), first, 2, 0.0, first_ids=ids).go == (train(0, number),)
    pool.ended(train(0, number), first + 2, 2, 0.0, cached_tokens=cached)


def test_what_groups_have_in_common_is_charged_once_when_four_have_found_it() -> None:
    """Of 42 tokens 40 are whole blocks without the last; 20 of them are common. Beside them 4 positions, one block."""
    pool = pool_of(1000, block_tokens=4, shares_prompts=True)
    opened(pool, 0, 0)  # nothing was there
    for number in range(1, 5):
        opened(pool, number, 22)
    assert pool.used_tokens == 5 * (40 + 4), "each charged as when it began"
    for number in range(5, 8):
        opened(pool, number, 22)
    assert pool.used_tokens == 5 * (40 + 4) + 20 + 3 * (20 + 4)
    assert pool.booked_tokens == pool.used_tokens
    admitted(pool, train(1, 7))
    assert pool.ask(train(1, 7), 42, 2, 0.0).go == (train(1, 7),)
    assert pool.used_tokens == 5 * (40 + 4) + 20 + 3 * (20 + 4) + 4
    for number in (5, 6, 7):
        pool.leave(train(0, number), finished=True)
    assert pool.used_tokens == 5 * 44 + 20 + 24, "one of the last group is left"
    pool.leave(train(1, 7), finished=True)
    assert pool.used_tokens == 5 * 44


def test_groups_that_begin_otherwise_share_with_others_like_them_only() -> None:
    """Two sets of tools of 20 tokens, and prompts that come again: each finds its own, which is not the others'."""
    pool = pool_of(1000, block_tokens=4, shares_prompts=True)

    def first_ids(tools: int, prompt: int) -> np.ndarray:
        return np.array([tools] * 22 + [prompt] * 20, np.int32)

    pool._charges.common._found["train:web"].extend([22] * 4)
    for number in range(4):
        opened(pool, number, 22, ids=first_ids(number % 2, number))
    assert pool.used_tokens == 4 * 4 + 4 * 20 + 2 * 20, "own blocks, the groups' parts, and both sets of tools"
    admitted(pool, train(0, 9))
    assert pool.booked_tokens - pool.used_tokens == 20, "what it begins with is not known: all of it is expected"
    for number in (0, 2):
        pool.leave(train(0, number), finished=True)
    assert pool.used_tokens == 2 * 4 + 2 * 20 + 20, "one set of tools has gone with the last of its groups"
    same = pool_of(1000, block_tokens=4, shares_prompts=True)
    same._charges.common._found["train:web"].extend([42] * 4)
    for number in range(4):
        opened(same, number, 42, ids=first_ids(0, number % 2))
    assert same.used_tokens == 4 * 4 + 2 * 40, "two prompts, each of which came twice, are there twice"


def test_an_evaluation_has_nothing_in_common_with_groups_of_training() -> None:
    pool = pool_of(1000, block_tokens=4, shares_prompts=True)
    for number in range(6):
        opened(pool, number, 20)
    before = pool.used_tokens
    key = TaskKey("eval", 0, 0)
    admitted(pool, key)
    assert pool.ask(key, 42, 2, 0.0).go == (key,)
    assert pool.used_tokens == before + 40 + 4


def test_a_shorter_prompt_has_no_more_in_common_than_it_is_long() -> None:
    """Of 17 tokens 16."""
    pool = pool_of(1000, block_tokens=4, shares_prompts=True)
    for number in range(6):
        opened(pool, number, 20)
    before = pool.used_tokens
    opened(pool, 6, 16, first=17)
    assert pool.used_tokens == before + 16 + 4, "another length is charged beside the first"


def test_an_engine_that_shares_nothing_has_nothing_in_common() -> None:
    pool = pool_of(1000, block_tokens=4)
    for number in range(8):
        opened(pool, number, 20)
    assert pool.used_tokens == 8 * 44


@pytest.mark.parametrize(
    ("found", "common"),
    [
        ((20, 20, 20), 0),  # too few
        ((20, 40, 40, 40), 20),  # three had their own prompts there
        ((20, 20, 20, 3), 0),  # less than a block
        ((0, 20, 24, 20, 28), 20),  # what the last four found
        ((99, 99, 99, 99), 40),  # all that is shared, and no more
    ],
)
def test_common_is_the_least_that_the_last_four_groups_found(found: tuple[int, ...], common: int) -> None:
    pool = pool_of(1000, block_tokens=4, shares_prompts=True)
    opened(pool, 0, 0)
    for number, cached in enumerate(found, start=1):
        opened(pool, number, cached)
    used = []
    for number in (50, 51):
        used.append(pool.used_tokens)
        opened(pool, number, common)
    assert (used[1] - used[0], pool.used_tokens - used[1]) == (44, 44 - common)


def test_members_that_begin_together_tell_what_the_first_of_them_found() -> None:
    """Three begin, and nobody knows in which order the engine took them; a fourth begins when one has ended."""
    pool = pool_of(1000, block_tokens=4, shares_prompts=True)
    opened(pool, 0, 0)
    for number in (1, 2, 3):
        opened(pool, number, 20)
    common = pool._charges.common
    members = [train(member, 9) for member in range(4)]
    admitted(pool, *members)
    for member in members[:3]:
        pool.ask(member, 42, 2, 0.0)
    pool.ended(members[0], 44, 2, 0.0, cached_tokens=40)
    pool.ask(members[3], 42, 2, 0.0)
    pool.ended(members[3], 44, 2, 0.0, cached_tokens=4)
    pool.ended(members[1], 44, 2, 0.0, cached_tokens=12)
    assert common.tokens("train:web") == 0, "one runs"
    pool.ended(members[2], 44, 2, 0.0, cached_tokens=40)
    assert common.tokens("train:web") == 12


@pytest.mark.parametrize("what", ["fails", "is interrupted", "loses its KV"])
def test_a_group_whose_beginning_is_disturbed_tells_nothing(what: str) -> None:
    pool = pool_of(1000, block_tokens=4, shares_prompts=True)
    opened(pool, 0, 0)
    for number in (1, 2, 3):
        opened(pool, number, 20)
    members = [train(member, 9) for member in range(2)]
    admitted(pool, *members)
    for member in members:
        pool.ask(member, 42, 2, 0.0)
    if what == "fails":
        pool.leave(members[0], finished=False)
    elif what == "loses its KV":
        pool.void()
    else:
        pool.ended(members[0], 43, 1, 0.0, interrupted=True, cached_tokens=20)
    pool.ended(members[1], 44, 2, 0.0, cached_tokens=40)
    assert pool._charges.common.tokens("train:web") == 0


def test_with_the_last_holder_of_a_group_its_prompt_makes_room_too() -> None:
    pool = pool_of(96, block_tokens=4, shares_prompts=True)
    admitted(pool, train(0), train(1), train(0, group=1), train(0, group=2))
    for member in (0, 1):
        pool.ask(train(member), 42, 6, 0.0)
        pool.ended(train(member), 48, 6, 1.0)
    assert pool.ask(train(0, group=1), 10, 2, 1.0).go
    assert pool.used_tokens == 40 + 8 + 8 + 8 + 4, "both wait, the other one runs"
    # 48 positions are wanted and 28 are free. The own parts of both are 16: not enough without their prompt's 40.
    verdict = pool.ask(train(0, group=2), 42, 6, 2.0)
    assert [departure.key for departure in verdict.departures] == [train(0), train(1)]
    assert verdict.go == (train(0, group=2),)
    assert pool.used_tokens == 8 + 4 + 40 + 8


def two_groups(charges: Charges) -> None:
    """Of one and of three members, with prompts of which 100 tokens are shared."""
    for group, members in ((0, 1), (1, 3)):
        for member in range(members):
            resident = Resident(train(member, group), "train:web", group, of_kind, first_tokens=101)
            charges.enter(resident)
        charges.learn(resident)


def test_prompts_are_expected_to_be_held_as_often_as_any_member_holds_kv() -> None:
    charges = Charges(1000, block_tokens=1, shares_prompts=True)
    two_groups(charges)
    assert charges.prompt_tokens == charges.expected_prompt_tokens(1.0) == 200
    # Two members each on average: with the chance 1 - 3/4 · 3/4 one of them holds KV.
    assert charges.expected_prompt_tokens(0.25) == 200 * 7 / 16
    assert charges.expected_prompt_tokens(0.0) == 0.0


def test_what_groups_have_in_common_is_expected_to_be_held_as_often_as_anybody_holds_kv() -> None:
    charges = Charges(1000, block_tokens=1, shares_prompts=True)
    charges.common._found["train:web"].extend([80] * 4)
    two_groups(charges)
    assert charges.prompt_tokens == charges.expected_prompt_tokens(1.0) == 80 + 2 * 20
    assert charges.expected_prompt_tokens(0.25) == 40 * 7 / 16 + 80 * (1 - (3 / 4) ** 4)
    # Of 110 tokens 10 are a member's own, and four members have the prompts' 120 together.
    assert charges.part_tokens(110.0) == 10 + 120 / 4


def test_who_gives_way_is_charged_nothing_and_the_whole_when_it_comes_back() -> None:
    pool = pool_of(CONTEXT, 1e-3, reload_token_s=1e-4)
    admitted(pool, train(0), train(1))
    turn(pool, train(0), 40, 20, 0.0)
    (departure,) = (verdict := pool.ask(train(1), 50, 10, 100.0)).departures
    assert (departure.key, departure.choice, departure.tokens, departure.ready) == (train(0), "offload", 60, False)
    assert verdict.go == (train(1),) and pool.used_tokens == 60
    assert pool.ask(train(0), 70, 10, 101.0).go == ()
    pool.ended(train(1), 60, 10, 102.0)
    pool.leave(train(1), finished=True)
    assert pool.pump(102.0).go == (train(0),)
    assert pool.used_tokens == 80
    outcome = pool.outcome(train(0), 102.0)
    assert outcome is not None
    assert (outcome.choice, outcome.tokens, outcome.waited_s, outcome.held_s) == ("offload", 60, 102.0, 100.0)


def test_kv_that_is_void_is_credited_and_has_no_outcome() -> None:
    pool = pool_of(CONTEXT, 1e-3)
    admitted(pool, train(0), train(1), train(2))
    turn(pool, train(0), 30, 10, 0.0)
    turn(pool, train(1), 30, 10, 0.0)
    pool.ask(train(2), 40, 10, 100.0)  # needs 50 of 56 that would be free beside one of them
    assert pool.outcome(train(1), 100.0) is not None
    pool.void()
    assert pool.used_tokens == 50, "what runs stays charged"
    assert pool.ask(train(1), 40, 6, 101.0).go == (train(1),)
    assert pool.outcome(train(1), 101.0) is None


def test_who_moves_keeps_its_age_and_takes_no_kv_along() -> None:
    here, there = pool_of(CONTEXT, 1e-3), pool_of(CONTEXT, 1e-3)
    admitted(here, train(0), train(1))
    admitted(there, train(8), train(9))
    here.ask(train(0), 80, 10, 0.0)
    there.ask(train(8), 80, 10, 0.0)
    here.ask(train(1), 50, 10, 1.0)
    there.ask(train(9), 50, 10, 2.0)
    assert here.transfer(train(1), there, 2.5) == Verdict()
    there.ended(train(8), 90, 10, 4.5)
    there.leave(train(8), finished=True)
    assert there.pump(4.5).go == (train(1),), "the oldest, of which nobody thought that it came last"
    assert (len(here), here.used_tokens, there.used_tokens) == (1, 90, 60)


def test_growth_is_what_a_turn_adds_in_all_and_an_interrupted_turn_is_one() -> None:
    pool = pool_of(192)
    admitted(pool, train(0))
    pool.ask(train(0), 20, 10, 0.0)
    pool.ended(train(0), 24, 4, 1.0, interrupted=True)
    pool.ask(train(0), 24, 6, 1.0)
    pool.ended(train(0), 29, 5, 2.0)
    growth = pool.kinds["train:web"].growth
    assert (list(growth._said._values), list(growth._grown._values)) == ([9], [])
    pool.ask(train(0), 33, 10, 5.0)
    assert (list(growth._first._values), list(growth._grown._values)) == ([20], [13])
    assert list(pool.kinds["train:web"].waits._waits) == [3.0]


def test_one_task_always_fits_an_empty_pool_and_many_only_by_the_forecast() -> None:
    pool = pool_of(CONTEXT)
    assert pool.room_for("train:web", CONTEXT, 0.0)
    assert not pool.room_for("train:web", CONTEXT, 0.0, 2)


@pytest.mark.parametrize("reload_token_s", [None, 1e-6])
def test_tasks_whose_environments_work_for_long_keep_nobody_out(reload_token_s: float | None) -> None:
    """Four of 45 positions and two of 20 would be 220, of 200: the four will load or compute theirs again."""
    pool = pool_of(200, 1e-3, reload_token_s=reload_token_s)
    admitted(pool, *map(train, range(4)))
    for number in range(4):
        turn(pool, train(number), 40, 5, 0.0)
    assert pool.room_for("train:web", 20.0, 100.0, 2)


def test_nobody_is_admitted_while_others_wait_or_the_batch_is_full() -> None:
    pool = pool_of(1000, max_batch=2)
    admitted(pool, *(train(number) for number in range(2 * BATCHES - 1)))
    assert pool.room_for("train:web", 20.0, 0.0), "one batch will run, and another is not full yet"
    admitted(pool, train(9))
    assert not pool.room_for("train:web", 20.0, 0.0)
    pool = pool_of(CONTEXT)
    admitted(pool, train(0), train(1))
    pool.ask(train(0), 80, 10, 0.0)
    pool.ask(train(1), 20, 10, 0.0)
    assert not pool.room_for("train:web", 1.0, 0.0)


def test_beside_those_who_wait_one_more_fills_a_gap_where_kv_comes_back_from_host_memory() -> None:
    def crowded(**changes: object) -> TaskPool:
        """96 positions, 62 of which run; the next turn needs 52. A turn says about 4, half of which is reserved."""
        pool = pool_of(CONTEXT, 1e-3, **changes)
        admitted(pool, train(0))
        for _ in range(16):
            pool.kinds["train:web"].growth.said(4, 100)
        pool.ask(train(0), 60, 4, 0.0)
        admitted(pool, train(1))
        assert pool.ask(train(1), 50, 4, 0.0) == Verdict()
        return pool

    pool = crowded(reload_token_s=1e-5, host_tokens=10 * CONTEXT)
    assert pool.used_tokens == 62
    assert pool.room_for("train:web", 32.0, 1.0)
    assert not pool.room_for("train:web", 33.0, 1.0), "35 positions, and 34 are free"
    assert not pool.room_for("train:web", 32.0, 3.0), "the patience is over: room is kept for who waits"
    assert not pool.room_for("train:web", 16.0, 1.0, 2), "one at a time"
    assert not pool.room_for("train:new", 10.0, 1.0), "nothing is known of what its turns say"
    admitted(pool, train(2))
    assert not pool.room_for("train:web", 16.0, 1.0), "who was admitted has not begun and will take as much"
    assert pool.room_for("train:web", 15.0, 1.0)
    for number in range(3, 1 + CANDIDATES):
        assert pool.room_for("train:web", 1.0, 1.0), number
        admitted(pool, train(number))
        pool.unbegun -= 1  # they have begun, and their environments work
    assert not pool.room_for("train:web", 1.0, 1.0), "of more, not each would be looked at for a place"
    assert not crowded().room_for("train:web", 10.0, 1.0), "computing again delays everybody"
    slow = crowded(reload_token_s=100.0, host_tokens=10 * CONTEXT)
    assert not slow.room_for("train:web", 10.0, 1.0), "loading takes longer than computing"
    # Three tasks of 120 positions in all, of which nothing else is known: half of 6 turns would fill 96, so a turn adds
    # 32, and 5/7 go on after each. They are expected to hold 120, 5/7 · 216 = 154, 25/49 · 312 = 159.2, 149 and less.
    for host_tokens, fits in ((63, False), (64, True)):
        small = crowded(reload_token_s=1e-5, host_tokens=host_tokens)
        assert small.room_for("train:web", 10.0, 1.0) is fits, "the pool's 96 and the host's"


def late_pool(budget: int = 400, **changes: object) -> TaskPool:
    """Turns run for 1.1 s. One task has begun 20 s after it was admitted, taken a turn up to 40 positions, and gone."""
    pool = pool_of(budget, 1e-3, **changes)
    admitted(pool, train(0))
    pool.ask(train(0), 30, 10, 20.0)
    pool.ended(train(0), 40, 10, 21.0)
    pool.leave(train(0), finished=True)
    assert pool.begins_late("train:web") and not pool.begins_late("eval:web")
    return pool


def test_tasks_that_begin_late_are_no_turns_and_hold_nothing_until_they_do() -> None:
    pool = late_pool(max_batch=4)
    admitted(pool, *(train(number) for number in range(1, 13)))
    assert (pool.unbegun, pool.late, pool.booked_tokens) == (12, 12, 0.0)
    assert pool.room_for("train:web", 30.0, 22.0), "beside one batch that runs and one that follows, nobody would begin"
    assert pool.room_for("eval:web", 30.0, 22.0), "others will have begun and ended meanwhile"
    pool.ask(train(1), 30, 10, 42.0)
    assert (pool.unbegun, pool.late, pool.booked_tokens) == (11, 11, 30.0)
    for number in range(1, 13):
        pool.leave(train(number), finished=False)
    assert (len(pool), pool.unbegun, pool.late, pool.booked_tokens) == (0, 0, 0, 0.0)


def test_as_many_begin_late_as_take_the_place_of_those_that_end() -> None:
    # Of 6 turns half are expected: four tasks of which 2/7 end after each. One more ended after its first, so that
    # 4/7 go on after that and 5/7 after the others: 1 + 4/7 · (1 + 5/7 + … + 5⁴/7⁴) = 2.63 turns. Of n that begin in
    # 20 s, each takes them: n · 2.63 / 20 turns a second, which hold 40 positions for 1.1 s and no longer.
    pool = late_pool(budget=400)
    turns = 1.0 + float(pool.kinds["train:web"].growth.tables().left_turns[0])
    assert turns == pytest.approx(1.0 + 4 / 7 * (1.0 - (5 / 7) ** 5) / (1.0 - 5 / 7))
    most = int(400 / (40 * 1.1 * turns / 20.0))
    assert most > 400 // 30, "more than would fit if all of them began at once"
    for number in range(most):
        assert pool.room_for("train:web", 30.0, 22.0), number
        admitted(pool, train(1 + number))
    assert not pool.room_for("train:web", 30.0, 22.0)
    small = late_pool(budget=4000, max_batch=1)
    most = int(BATCHES * 1 / (1.1 * turns / 20.0))
    admitted(small, *(train(1 + number) for number in range(most - 1)))
    assert small.room_for("train:web", 30.0, 22.0)
    admitted(small, train(most))
    assert not small.room_for("train:web", 30.0, 22.0), "two batches of turns would be in the engine"


def test_an_engine_with_nothing_in_flight_takes_one_that_begins_late_whatever_it_holds() -> None:
    pool = late_pool(budget=96)
    assert pool.room_for("train:web", 96.0, 22.0)
    admitted(pool, train(1))
    assert not pool.room_for("train:web", 96.0, 22.0, 8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    contexts=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    newcomer=st.integers(1, 60),
    tasks=st.integers(2, 4),  # one alone is welcome where no turn runs
    z=st.sampled_from([0.0, 1.0, 2.5]),
    budget=st.integers(100, 900),
    shares=st.booleans(),
)
def test_room_is_there_exactly_when_mean_and_deviations_of_everybody_fit(
    contexts: list[int], newcomer: int, tasks: int, z: float, budget: int, shares: bool
) -> None:
    """Summed task by task, each with its own chances; a group of two here, and what it shares once."""
    pool = pool_of(10_000, growth_z=z, shares_prompts=shares)
    for number, context in enumerate(contexts):
        admitted(pool, train(number, group=number // 2))
        turn(pool, train(number, group=number // 2), context, 5, 0.0)
    tables = pool.kinds["train:web"].growth.tables()
    firsts = {number // 2: context for number, context in reversed(list(enumerate(contexts)))}
    shared = {group: first - 1 if shares else 0 for group, first in firsts.items()}
    own = [(1, max(1, context + 5 - shared[number // 2])) for number, context in enumerate(contexts)]
    own += [(0, newcomer)] * tasks
    peaks = []
    for h in range(MAX_TURNS):
        mean = variance = 0.0
        for turns, tokens in own:
            p, then = float(tables.alive[h, turns]), tokens + float(tables.grown_tokens[h])
            mean += p * then
            variance += p * (1 - p) * then**2 + p * float(tables.grown_variance[h])
        peaks.append(mean + z * math.sqrt(max(variance, 0.0)))
    needed = max(peaks) + sum(shared.values())
    pool.budget_tokens = budget
    if abs(needed - budget) > 1e-6:
        assert pool.room_for("train:web", newcomer, 0.0, tasks) == (needed <= budget)


def test_an_engine_without_a_turn_takes_one_task_more_whatever_the_forecast_says() -> None:
    pool = pool_of(CONTEXT)
    admitted(pool, train(0))
    turn(pool, train(0), 80, 10, 0.0)
    assert pool.room_for("train:web", 20.0, 1.0)
    assert not pool.room_for("train:web", 20.0, 1.0, 2)
    admitted(pool, train(1))
    assert not pool.room_for("train:web", 20.0, 1.0), "one is about to run"


def test_memory_costs_what_its_running_part_earns() -> None:
    """What a task that runs has reserved, and the mean context; the second turn's context is 50 when it is asked."""
    pool = pool_of(1000, 1e-3)
    admitted(pool, train(0), train(1))
    turn(pool, train(0), 30, 10, 0.0)
    assert train(1) in pool.ask(train(1), 50, 10, 0.0).go
    expected = pool.rates.elasticity(1) / (60 + (40 + 20) / 2)
    assert pool.price().token_second == pytest.approx(expected)
    assert pool.price().compute_token_s == pytest.approx(1e-3)
    pool.ended(train(1), 55, 5, 0.0)
    assert pool.price().token_second == pytest.approx(pool.rates.elasticity(0) / ((40 + 50) / 2)), "nobody is delayed"


def test_tasks_that_wait_longer_than_their_kv_is_worth_do_not_count_in_the_forecast() -> None:
    pool = pool_of(10_000, 1e-3)
    admitted(pool, train(0), train(1), train(2), train(3))
    for number in range(3):
        turn(pool, train(number), 30, 10, float(number))
    hold_s = pool.price().hold_s
    assert 0.0 < hold_s < 1.0, "else the moments below say nothing"
    assert pool._resident(2.0 + 0.5 * hold_s) == pytest.approx(1 - 2 / 4)
    assert pool._resident(2.0 + 2.0 * hold_s) == pytest.approx(1 - 3 / 4)


def test_priorities_reach_the_engine_only_while_somebody_waits_for_room() -> None:
    pool = pool_of(CONTEXT)
    pool.admit(
        train(0), "train:web", ("train", 0), 20.0, lambda resident, now_s: TaskFacts(group_done_fraction=0.5), 0.0
    )
    pool.admit(
        TaskKey("eval", 0, 0), "eval:web", ("eval", 0), 20.0, lambda resident, now_s: TaskFacts(evaluation=True), 0.0
    )
    assert (pool.engine_priority(train(0), 0.0), pool.engine_priority(TaskKey("eval", 0, 0), 0.0)) == (0.0, 8.0)
    pool.ask(train(0), 60, 10, 0.0)
    pool.ask(TaskKey("eval", 0, 0), 60, 10, 0.0)
    assert len(pool._ready) == 1
    assert pool.engine_priority(train(0), 0.0) == 4.0 * 0.5
