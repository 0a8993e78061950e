"""How full a pool will be and how tasks grow: enumerated outcomes, hand-computed chances, censored tasks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.schedule.forecast import Population, Share, forecast, peak
from tiderl.schedule.growth import PRIOR_TASKS, REMEMBERED_TURNS, GrowthTables, Recent, TaskGrowth

# --- the forecast


def tables(goes_on: Sequence[float], growth: float, deviation: float) -> GrowthTables:
    """`goes_on[k]`: the chance that a task with k steps done has not ended one step later."""
    steps = len(goes_on)
    alive = np.zeros((steps, steps))
    for h, k in itertools.product(range(steps), range(steps)):
        alive[h, k] = math.prod(goes_on[k : k + h]) if k + h < steps else 0.0
    then = np.arange(steps, dtype=np.float64)
    return GrowthTables(alive, then * growth, then * deviation**2, alive[1:].sum(axis=0))


def enumerated(tasks: Sequence[tuple[int, int]], table: GrowthTables, resident: float) -> list[tuple[float, float]]:
    """Mean and variance of the tokens held after every number of steps, from all outcomes of all tasks: it has ended or
    not, holds its KV or not, and has grown by one deviation more or less than the mean."""
    found = []
    for h in range(len(table.alive)):
        mean = square = 0.0
        deviation = math.sqrt(table.grown_variance[h])
        for outcome in itertools.product(itertools.product((0, 1), (0, 1), (-1, 1)), repeat=len(tasks)):
            chance, held = 1.0, 0.0
            for (k, tokens), (lives, holds, more) in zip(tasks, outcome, strict=True):
                p = table.alive[h, k]
                chance *= (p if lives else 1 - p) * (resident if holds else 1 - resident) * 0.5
                held += lives * holds * (tokens + table.grown_tokens[h] + more * deviation)
            mean += chance * held
            square += chance * held**2
        found.append((mean, square - mean**2))
    return found


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    tasks=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50)), min_size=1, max_size=3),
    goes_on=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
    growth=st.floats(0.0, 20.0),
    deviation=st.floats(0.0, 5.0),
    resident=st.sampled_from([1.0, 0.6, 0.0]),
)
def test_mean_and_variance_are_those_of_all_outcomes(
    tasks: list[tuple[int, int]], goes_on: list[float], growth: float, deviation: float, resident: float
) -> None:
    table = tables(goes_on, growth, deviation)
    population = Population(3)
    for k, tokens in tasks:
        population.add(k, tokens)
    mean, variance = forecast([Share(population, table)], resident=resident)
    expected = enumerated(tasks, table, resident)
    assert mean == pytest.approx([m for m, _ in expected], rel=1e-9, abs=1e-9)
    assert variance == pytest.approx([v for _, v in expected], rel=1e-9, abs=1e-6)


def test_kinds_and_newcomers_add_up() -> None:
    table = tables([0.5, 0.5, 0.0], 10.0, 0.0)
    one, other = Population(3), Population(3)
    one.add(0, 100)
    other.add(1, 40)
    newcomers = np.array([[0.0, 0.0, 0.0], [2.0, 2 * 30.0, 2 * 30.0**2]])
    mean, variance = forecast([Share(one, table), Share(other, table)], newcomers)
    # Now all; one step on half of each, 10 longer; two steps on a quarter, and nothing of who was near its last turn.
    assert mean.tolist() == [200.0, 0.5 * 110 + 0.5 * 50 + 2 * 0.5 * 40, 0.25 * 120 + 2 * 0.25 * 50]
    assert variance[0] == 0.0
    assert variance[1] == pytest.approx(0.25 * (110**2 + 50**2 + 2 * 40**2))
    assert peak(mean, variance, 2.0) == pytest.approx(max(200.0, mean[1] + 2 * math.sqrt(variance[1])))


def test_who_has_left_leaves_nothing_behind() -> None:
    population = Population(2)
    population.add(1, 12)
    population.add(0, 5)
    population.remove(1, 12)
    assert population.sums.tolist() == [1.0, 5.0, 25.0, 0.0, 0.0, 0.0]
    assert sum(population.sums[1::3]) == 5.0


# --- growth


def test_survival_by_hand_with_a_task_that_still_runs() -> None:
    growth = TaskGrowth(3, 1000)
    # Prior: four tasks with the chance 2/4 to end after each turn.
    growth.ended(1)  # A ends after one turn
    growth.went_on(1, 10)  # B goes on after one
    growth.ended(2)  # and ends after two
    growth.went_on(1, 10)  # C goes on after one; nothing is known of its second
    table = growth.tables()
    after_1, after_2 = 1 - (2 + 1) / (4 + 3), 1 - (2 + 1) / (4 + 1)
    assert table.alive == pytest.approx(
        np.array([[1, 1, 1], [after_1, after_2, 0], [after_1 * after_2, 0, 0]]), rel=1e-12
    )
    assert table.left_turns == pytest.approx([after_1 + after_1 * after_2, after_2, 0.0])


@dataclass(frozen=True)
class Life:
    turns: int
    ended: bool


LIVES = st.lists(st.builds(Life, st.integers(1, 6), st.booleans()), max_size=40)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lives=LIVES)
def test_survival_is_kaplan_meiers_with_censored_tasks(lives: list[Life]) -> None:
    """At risk after turn k are those of which it is known whether they went on."""
    growth = TaskGrowth(6, 1000)
    for life in lives:
        for turn in range(1, life.turns):
            growth.went_on(turn, 5)
        if life.ended:
            growth.ended(life.turns)
    survival = 1.0
    for turn in range(1, 6):
        at_risk = sum(life.turns > turn or (life.turns == turn and life.ended) for life in lives)
        died = sum(life.turns == turn and life.ended for life in lives)
        survival *= 1 - (died + PRIOR_TASKS * 2 / 7) / (at_risk + PRIOR_TASKS)
        assert growth._computed().alive[turn, 0] == pytest.approx(survival, rel=1e-9)


def test_before_anything_is_known_tasks_live_half_of_their_turns() -> None:
    growth = TaskGrowth(9, 900)
    chances = growth.tables().alive[:, 0]
    assert chances == pytest.approx([0.8**h for h in range(9)])
    assert growth.growth_tokens == 200.0, "the longest context is full after half of the turns"
    assert growth.first_tokens(1.0) is None
    assert not growth.first_is_known


def test_a_class_of_turns_is_as_hard_to_survive_as_its_turns_together() -> None:
    growth = TaskGrowth(128, 1000)  # two turns a class
    assert (growth.step_turns, growth.steps) == (2, 64)
    for _ in range(100_000):  # of each two that come so far, one ends
        growth.went_on(1, 1)
        growth.ended(1)
    assert growth.tables().alive[1, 0] == pytest.approx(0.5**2, rel=1e-3)
    assert [growth.step_of(turns) for turns in (0, 1, 2, 127, 500)] == [0, 0, 1, 63, 63]


def test_growth_and_its_variance_are_those_of_the_last_turns() -> None:
    growth = TaskGrowth(4, 1000)
    for tokens in (10, 20) * 8:
        growth.went_on(1, tokens)
    table = growth.tables()
    assert table.grown_tokens.tolist() == [0.0, 15.0, 30.0, 45.0]
    assert table.grown_variance.tolist() == [0.0, 25.0, 50.0, 75.0]


def test_a_group_needs_a_probe_only_while_first_contexts_differ() -> None:
    growth = TaskGrowth(4, 1000)
    for tokens in (100, 140) * 4:
        growth.started(tokens)
    assert growth.first_is_known
    assert growth.first_tokens(2.0) == 120.0 + 2 * 20.0
    for tokens in (20, 300) * 4:
        growth.started(tokens)
    assert not growth.first_is_known


def test_what_is_reserved_follows_what_turns_say_for_ever() -> None:
    growth = TaskGrowth(4, 1000)
    for said in range(15):
        growth.said(said, 100)
    assert growth.reserved_tokens(512) == 512, "too little is known"
    for _ in range(2 * REMEMBERED_TURNS):
        growth.said(40, 100)
    assert growth.reserved_tokens(512) == 20, "half of a turn"
    assert growth.reserved_tokens(8) == 8
    for _ in range(REMEMBERED_TURNS):
        growth.said(400, 100)
    assert growth.reserved_tokens(512) == 200


def test_where_giving_way_is_cheap_half_of_the_mean_is_reserved() -> None:
    growth = TaskGrowth(4, 1000)
    for said in (10, 31) * 8:
        growth.said(said, 100)
    assert growth.reserved_tokens(512, cheap=True) == 11, "20.5 on average"
    assert growth.reserved_tokens(512) == 16, "the quantile is 31"
    assert growth.reserved_tokens(8, cheap=True) == 8
    silent = TaskGrowth(4, 1000)
    for _ in range(16):
        silent.said(0, 100)
    assert silent.reserved_tokens(512, cheap=True) == 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(values=st.lists(st.integers(-1000, 100_000), min_size=1, max_size=700))
def test_recent_numbers_are_summed_exactly(values: list[int]) -> None:
    recent = Recent()
    for value in values:
        recent.append(value)
    last = values[-REMEMBERED_TURNS:]
    assert len(recent) == len(last)
    assert recent.mean == pytest.approx(float(np.mean(last)), rel=1e-12)
    assert recent.variance == pytest.approx(float(np.var(last)), rel=1e-9, abs=1e-9)
    assert recent.quantile(0.5) == float(np.median(last))
