"""What an engine's turns tell of it, and what the trainer can take: lines and Little's law by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tiderl.schedule.appetite import MARGIN, SATED, SMOOTHING, Appetite
from tiderl.schedule.rates import (
    FULL,
    LEAST,
    MIN_TURNS,
    REFRESH_EVERY,
    REMEMBERED_TOKENS,
    REMEMBERED_TURNS,
    Bin,
    EngineRates,
    fitted_line,
)


def fed(turns: list[tuple[int, float]], *, each: int = 2 * REFRESH_EVERY, prefill_token_s: float = 1e-3) -> EngineRates:
    """Turns beside so many that take so long, `each` of them; 100 tokens of each are computed."""
    rates = EngineRates()
    for running, seconds in turns:
        for _ in range(each):
            prefill_s = 100 * prefill_token_s
            rates.observe(
                computed_tokens=100, new_tokens=5, prefill_s=prefill_s, decode_s=seconds - prefill_s, running=running
            )
    return rates


def told(rates: EngineRates, tokens: int, seconds: float) -> None:
    """A turn that waited long for its first token ends, and the engine has computed so much since it began."""
    rates.observe(
        computed_tokens=100,
        new_tokens=5,
        prefill_s=9.0,
        decode_s=1.0,
        running=4,
        prefilled_tokens=tokens,
        prefilled_s=seconds,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    base=st.floats(0.1, 10.0),
    slope=st.floats(0.001, 1.0),
    sizes=st.lists(st.integers(1, 500), min_size=2, max_size=6, unique=True),
)
def test_a_line_is_found_exactly(base: float, slope: float, sizes: list[int]) -> None:
    assume(max(sizes) - min(sizes) >= 0.25 * max(sizes))
    bins = [Bin(MIN_TURNS, size, base + slope * size) for size in sizes]
    assert fitted_line(bins) == (pytest.approx(base, rel=1e-6), pytest.approx(slope, rel=1e-6))


def test_lines_that_cannot_be_are_flat_or_go_through_nothing() -> None:
    assert fitted_line([]) == (1.0, 0.0)
    assert fitted_line([Bin(9, 10.0, 4.0)]) == (2.0, 0.2), "one size: half of the time is shared"
    assert fitted_line([Bin(9, 10.0, 4.0), Bin(9, 11.0, 9.0)]) == (3.25, pytest.approx(3.25 / 10.5))
    assert fitted_line([Bin(9, 1.0, 4.0), Bin(9, 9.0, 2.0)]) == (3.0, 0.0), "turns that are faster together"
    base, slope = fitted_line([Bin(9, 1.0, 1.0), Bin(9, 10.0, 100.0)])
    assert (base, slope) == (0.0, pytest.approx((1.0 + 10.0) / 2))


def test_elasticity_is_the_shared_part_of_a_turn() -> None:
    rates = fed([(2, 1.2), (20, 3.0)])  # a(b) = 1 + b / 10
    assert rates.elasticity(10) == pytest.approx(1 / 2)
    assert rates.elasticity(30) == pytest.approx(1 / 4)
    assert rates.elasticity(1e9) == LEAST
    assert rates.elasticity(0) == pytest.approx(1 / 1.1), "as with one"
    assert rates.elasticity(30, max_batch=30) == pytest.approx(1 / 4)
    assert rates.elasticity(31, max_batch=30) == FULL


def test_before_enough_turns_nothing_is_claimed() -> None:
    rates = fed([(4, 2.0)], each=MIN_TURNS - 1)
    assert (rates.known, rates.elasticity(4), rates.compute_token_s) == (False, 1.0, 0.0)
    rates.observe(computed_tokens=100, new_tokens=0, prefill_s=9.0, decode_s=0.0, running=1)
    assert not rates.known, "a turn that said nothing tells nothing"
    rates.observe(computed_tokens=100, new_tokens=1, prefill_s=0.1, decode_s=1.9, running=4)
    assert (rates.known, rates.compute_token_s, rates.active_s) == (True, pytest.approx(1e-3), pytest.approx(2.0))


def test_a_prefill_costs_what_the_cheapest_did() -> None:
    """Others waited for somebody else's."""
    rates = EngineRates()
    for number in range(100):
        prefill_s = 0.1 if number % 10 == 0 else 5.0
        rates.observe(computed_tokens=100, new_tokens=5, prefill_s=prefill_s, decode_s=1.0, running=4)
        rates.observe(computed_tokens=0, new_tokens=5, prefill_s=0.0, decode_s=1.0, running=4)
    assert rates.compute_token_s == pytest.approx(1e-3)


def test_an_engine_that_measures_prefills_is_believed() -> None:
    """Whatever turns waited; seconds and tokens that lie further back count less."""
    rates = EngineRates()
    for _ in range(MIN_TURNS):
        told(rates, 2000, 0.5)
    assert rates.compute_token_s == pytest.approx(0.5 / 2000), "told eight times, and counted once"
    tokens, more = 2000, int(REMEMBERED_TOKENS)
    for _ in range(REFRESH_EVERY):
        told(rates, tokens + more, 0.5 + more * 1e-3)
    kept = math.exp(-1)
    assert rates.compute_token_s == pytest.approx((0.5 * kept + more * 1e-3) / (tokens * kept + more))


def test_a_new_process_begins_to_count_anew() -> None:
    rates = EngineRates()
    for tokens, seconds in ((1000, 1.0), (100, 0.3), (300, 0.5)):
        for _ in range(MIN_TURNS):
            told(rates, tokens, seconds)
    tokens, seconds = rates._measured
    kept = math.exp(-200 / REMEMBERED_TOKENS)
    assert (tokens, seconds) == (pytest.approx(1000 * kept + 200), pytest.approx(1.0 * kept + 0.2))


def test_an_engine_that_stands_idle_would_gain_all() -> None:
    rates = fed([(2, 1.2), (20, 3.0)])
    busy, active_s = rates.elasticity(10), rates.active_s
    rates.spent(0.0, running=0)
    assert rates.elasticity(10) == busy, "no time has passed"
    rates.spent(REMEMBERED_TURNS * active_s, running=0)
    idle = 1 - math.exp(-1)
    assert rates.elasticity(10) == pytest.approx(idle + (1 - idle) * busy)
    rates.spent(2 * REMEMBERED_TURNS * active_s, running=1)
    assert rates.elasticity(10) == pytest.approx(idle / math.e + (1 - idle / math.e) * busy)
    assert rates.running == pytest.approx(idle)


def test_what_runs_is_averaged_over_turns_and_not_over_seconds() -> None:
    """Eight at a time end eight times as often."""
    rates = fed([(2, 1.2)])
    rates.running = 8.0
    rates.spent(0.0, running=8)
    rates.spent(REMEMBERED_TURNS * rates.active_s / 8, running=4)
    assert rates.running == pytest.approx(8.0 - 4.0 * (1 - math.exp(-1)))


# --- the trainer


def sated(batch: int) -> Appetite:
    """Of a trainer that has hardly waited for a long time."""
    appetite = Appetite(batch)
    for _ in range(30):
        appetite.trained(0.0, 10.0)
    assert appetite.waited_fraction < SATED
    return appetite


def test_as_many_tasks_as_little_says() -> None:
    appetite = sated(8)
    appetite.updates_done(1, 100.0)
    appetite.updates_done(1, 150.0)
    assert appetite.tasks(batch_is_ready=True) == math.inf, "one update tells no interval"
    appetite.updates_done(3, 120.0)
    appetite.lived(40.0)
    # 8 trajectories every 10 s that live 40 s each: 32, and a margin.
    assert appetite.update_s == 10.0
    assert appetite.tasks(batch_is_ready=True) == MARGIN * 8 * 40.0 / 10.0
    assert appetite.tasks(batch_is_ready=False) == math.inf


def test_newer_updates_and_lives_count_more() -> None:
    appetite = sated(10)
    for update, moment in ((1, 0.0), (2, 10.0), (3, 30.0)):
        appetite.updates_done(update, moment)
    appetite.lived(40.0)
    appetite.lived(60.0)
    assert appetite.update_s == pytest.approx(10.0 + SMOOTHING * 10.0)
    assert appetite.life_s == pytest.approx(40.0 + SMOOTHING / 10 * 20.0)


def test_a_trainer_that_waits_takes_all_it_can_get() -> None:
    appetite = sated(8)
    appetite.updates_done(1, 0.0)
    appetite.updates_done(2, 10.0)
    appetite.lived(40.0)
    assert appetite.tasks(batch_is_ready=True) == 40.0
    appetite.trained(6.0, 2.0)
    assert appetite.waited_fraction == pytest.approx(SMOOTHING * 0.75, abs=1e-3)
    assert appetite.tasks(batch_is_ready=True) == math.inf
    appetite.trained(0.0, 0.0)
    assert appetite.waited_fraction == pytest.approx((1 - SMOOTHING) * SMOOTHING * 0.75, abs=1e-3)
