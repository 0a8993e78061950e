"""The vLLM engine against the slow oracle: log-probs after updates, KV by version, pins under pressure, bad input."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.engine_core_suite import drain, run
from support.tiny_models import VOCAB_SIZE, folder, replace, task, turn, write_weights
from support.vllm_models import BLOCK_TOKENS, KINDS, engine_settings, oracle, state, weights

from tiderl.data.errors import CheckpointError, ConfigurationError, InvariantViolation
from tiderl.data.records import WeightHandle
from tiderl.data.turns import Turn, TurnFailure, TurnResult

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.live]

from tiderl.engines.vllm_engine import VllmEngine  # noqa: E402 only where vLLM is installed

Make = Callable[..., VllmEngine]
TOLERANCE = 2e-5


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[VllmEngine] = []

    def built(kind: str = "tied", *, load: bool = True, clock: Any = None, **changes: Any) -> VllmEngine:
        settings = engine_settings(kind, **changes)
        made.append(VllmEngine(settings) if clock is None else VllmEngine(settings, clock))
        if load:
            made[-1].load_weights(weights(kind))
        return made[-1]

    yield built
    for engine in made:
        engine.close()


def words(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, tokens).tolist()


def check_against_oracle(kind: str, one: Turn, result: TurnResult, tolerance: float = TOLERANCE) -> None:
    """Every token's log-prob under the weights that it names, from an unbatched forward without a cache."""
    import torch

    ids = np.concatenate([one.ids, result.ids]).astype(int)
    for version in np.unique(result.versions):
        with torch.inference_mode():
            logits = oracle(kind, int(version))(torch.tensor([ids.tolist()])).logits[0].double()
        table = torch.log_softmax(logits / one.sampling.temperature, dim=-1).numpy()
        for n in np.flatnonzero(result.versions == version):
            assert table[len(one.ids) + n - 1, result.ids[n]] == pytest.approx(result.logprobs[n], abs=tolerance)


# ---- log-probs and versions


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_the_weights_after_every_update(make: Make, kind: str) -> None:
    engine = make(kind, load=False)
    for version in range(3):
        engine.load_weights(weights(kind, version))
        turns = [turn(10 * version + n, words(40, n), 8, temperature=0.7 + 0.3 * n) for n in range(3)]
        for one, result in zip(turns, run(engine, *turns), strict=True):
            assert set(result.versions.tolist()) == {version}
            check_against_oracle(kind, one, result)


@pytest.mark.parametrize("kv_policy", ["ctb", "lru"])
def test_a_turn_in_flight_goes_on_under_the_new_weights(make: Make, kv_policy: str) -> None:
    engine = make("untied", kv_policy=kv_policy)
    one = turn(0, words(70), 40)
    engine.add(one)
    while engine.stats().generated_tokens < 10:
        engine.step()
    before = engine.stats().prefilled_tokens
    engine.load_weights(weights("untied", 1))
    (result,) = drain(engine)
    assert isinstance(result, TurnResult)
    assert np.unique(result.versions).tolist() == [0, 1] and len(result.ids) == 40
    old = int((result.versions == 0).sum())
    assert engine.stats().prefilled_tokens - before == 70 + old  # the context and its own tokens, all of them again
    assert engine.stats().preemptions == 0 and result.recompute_s > 0
    check_against_oracle("untied", one, result)


@pytest.mark.parametrize("kv_policy", ["ctb", "lru"])
def test_no_hit_on_an_old_versions_blocks(make: Make, kv_policy: str) -> None:
    engine = make(kv_policy=kv_policy)
    context = words(4 * BLOCK_TOKENS)
    run(engine, turn(0, context, 2))
    (again,) = run(engine, turn(1, context, 2))
    assert again.cached_tokens == 3 * BLOCK_TOKENS  # of the last block one token at least is computed
    engine.load_weights(weights("tied", 1))
    assert engine.stats().resident_tokens == 0
    one = turn(2, context, 2)
    (new,) = run(engine, one)
    assert new.cached_tokens == 0
    check_against_oracle("tied", one, new)


def test_weights_that_do_not_fit_change_nothing(make: Make) -> None:
    engine = make()
    (first,) = run(engine, turn(0, words(70), 4))
    missing = state("tied", 1)
    del missing["model.norm.weight"]
    wrong = state("tied", 1)
    wrong["model.norm.weight"] = wrong["model.norm.weight"][:-1].clone()
    for handle, what in (
        (write_weights(missing, "vllm-missing", 1), "missing"),
        (write_weights(wrong, "vllm-wrong", 1), "shape"),
        (WeightHandle(1, str(folder() / "nowhere.safetensors"), 0), "cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=what):
            engine.load_weights(handle)
    assert engine.stats().version == 0
    one = turn(0, [*words(70), *first.ids.tolist()], 4, at=1)
    (second,) = run(engine, one)
    assert second.cached_tokens == 64
    check_against_oracle("tied", one, second)


def test_greedy_takes_the_largest_logit_with_logprob_0(make: Make) -> None:
    one = turn(0, words(20), 6, temperature=0.0)
    (result,) = run(make(), one)
    assert result.logprobs.tolist() == [0.0] * 6
    import torch

    with torch.inference_mode():
        logits = oracle("tied", 0)(torch.tensor([[*one.ids.tolist(), *result.ids.tolist()]])).logits[0]
    assert logits.argmax(-1)[19:-1].tolist() == result.ids.tolist()


def test_seconds_are_of_the_clock_and_in_order(make: Make) -> None:
    ticks = iter(range(1000))
    engine = make(clock=lambda: float(next(ticks)))
    (result,) = run(engine, turn(0, [4, 5], 3))
    assert result.queued_s > 0 and result.prefill_s > 0 and result.decode_s > 0
    assert result.ended_s == sum((result.queued_s, result.prefill_s, result.decode_s))  # it was added at tick 0


def test_an_engine_outlives_another_of_its_process(make: Make) -> None:
    one, other = make(), make("untied")
    run(one, turn(0, words(20), 2))
    one.close()
    one.close()
    assert one.stats().resident_tokens == one.stats().running == 0 and not one.has_work()
    del one
    gc.collect()  # nor does it take anything along when its memory goes
    again = turn(0, words(20), 4)
    (result,) = run(other, again)
    check_against_oracle("untied", again, result)
    other.load_weights(weights("untied", 1))
    later = turn(0, words(20), 4, at=1)
    (result,) = run(other, later)
    check_against_oracle("untied", later, result)


# ---- bad input


@pytest.mark.parametrize("ids", [[], [VOCAB_SIZE], [-1]])
def test_ids_outside_the_vocabulary_are_refused(make: Make, ids: list[int]) -> None:
    with pytest.raises(InvariantViolation, match="turn 0 of train/0"):
        make().add(turn(0, ids))


def test_a_temperature_that_vllm_would_raise_is_refused(make: Make) -> None:
    engine = make()
    with pytest.raises(ConfigurationError, match=r"temperature 0\.005"):
        engine.add(turn(0, [5, 6], temperature=0.005))
    one = turn(0, words(20), 6, temperature=0.01)
    (result,) = run(engine, one)
    check_against_oracle("tied", one, result, tolerance=2e-3)  # logits times 100: rounding too


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_nan_logits_fail_only_their_own_turn(make: Make, temperature: float) -> None:
    poisoned = state("untied", 0)  # its head is not tied, so only a turn that reads token 60 meets the NaN
    poisoned["model.embed_tokens.weight"][60] = float("nan")
    engine = make("untied", load=False)
    engine.load_weights(write_weights(poisoned, "vllm-poisoned", 0))
    bad = turn(0, [5, 60, *[7] * 40], 4, temperature=temperature)
    good = turn(1, [5, 6, 7, 8], 4, stop_ids=(60,))
    engine.add(bad)
    engine.add(good)
    outcomes = {outcome.task: outcome for outcome in drain(engine)}
    failure, fine = outcomes[task(0)], outcomes[task(1)]
    assert isinstance(failure, TurnFailure) and isinstance(fine, TurnResult)
    assert failure.error == "numerical" and "turn 0 of train/0.0#0" in failure.what
    check_against_oracle("untied", good, fine)
    assert str(task(0)) not in engine.stats().holders
    # The blocks' next owners read nothing of what the failed turn left there.
    again = [turn(n, [5, 6], 4, at=1, stop_ids=(60,)) for n in (0, 2)]
    for one, result in zip(again, run(engine, *again), strict=True):
        check_against_oracle("untied", one, result)


def test_what_vllm_cannot_run_is_refused_with_the_reason() -> None:
    model = replace(engine_settings().model, path="scratch", hidden=96, heads=4, kv_heads=2)
    with pytest.raises(ConfigurationError, match="heads of 24"):
        VllmEngine(engine_settings(model=model))
    with pytest.raises(ConfigurationError, match="KV policy 'mine'"):
        VllmEngine(engine_settings(kv_policy="mine"))


# ---- pins (kv_policy ctb). A pool of 13 blocks; each task's context is 4 blocks and a token.

POOL = {"kv_budget_tokens": 13 * BLOCK_TOKENS, "max_batch": 8}
CONTEXT_TOKENS = 4 * BLOCK_TOKENS + 1


def waiting(engine: VllmEngine, *numbers: int, priority: float = 0.0) -> None:
    """Tasks that ran their first turn, one after the other, and wait with 4 pinned blocks each."""
    for number in numbers:
        run(engine, turn(number, words(CONTEXT_TOKENS, number), 2, priority=priority))


def comes_back(engine: VllmEngine, number: int) -> int:
    """Cached tokens of its next turn."""
    (result,) = run(engine, turn(number, words(CONTEXT_TOKENS, number), 2, at=1))
    return result.cached_tokens


def test_a_waiting_task_keeps_its_blocks_while_others_run(make: Make) -> None:
    engine = make(**POOL)
    waiting(engine, 0)
    for number in range(1, 8):  # 7 tasks that do not come back: 35 blocks through a pool of 13
        run(engine, turn(number, words(CONTEXT_TOKENS, number), 2, retain=False))
    assert comes_back(engine, 0) == 4 * BLOCK_TOKENS


def test_under_lru_it_does_not(make: Make) -> None:
    engine = make(kv_policy="lru", **POOL)
    assert not engine.capabilities.retain
    waiting(engine, 0)
    for number in range(1, 8):
        run(engine, turn(number, words(CONTEXT_TOKENS, number), 2, retain=False))
    assert comes_back(engine, 0) == 0


def test_a_pool_full_of_pins_serves_the_next_task_at_once(make: Make) -> None:
    engine = make(**POOL)
    waiting(engine, 0, 1, 2)
    assert engine.stats().held_tokens == 12 * BLOCK_TOKENS
    engine.add(turn(9, words(CONTEXT_TOKENS, 9), 2))
    steps = 0
    while engine.has_work():
        engine.step()
        steps += 1
    assert steps == 2  # one for each token
    # It takes 5 blocks and 1 is free: one task of 4 went, the longest unused.
    assert engine.stats().evicted_tokens == 4 * BLOCK_TOKENS
    assert set(engine.stats().holders) == {str(task(1)), str(task(2)), str(task(9))}


def test_the_lowest_priority_loses_its_pin_first(make: Make) -> None:
    engine = make(**POOL)
    waiting(engine, 0, priority=0.5)
    waiting(engine, 1, priority=-1.0)
    waiting(engine, 2, priority=0.0)
    run(engine, turn(9, words(BLOCK_TOKENS, 9), 2, retain=False))
    assert set(engine.stats().holders) == {str(task(0)), str(task(2))}


def test_a_running_turn_grows_into_pins_and_gives_nothing_way(make: Make) -> None:
    engine = make(**POOL)
    waiting(engine, 0, 1)
    run(engine, turn(9, words(CONTEXT_TOKENS, 9), 3 * BLOCK_TOKENS))  # 7 blocks in the end, 5 are free
    assert engine.stats().preemptions == 0
    assert engine.stats().evicted_tokens == 4 * BLOCK_TOKENS
    assert engine.stats().holders == (str(task(9)), str(task(1)))


def test_the_whole_pool_for_one_turn_drops_even_its_own_pin(make: Make) -> None:
    engine = make(**POOL)
    waiting(engine, 0, 1, 2)
    one = turn(0, words(13 * BLOCK_TOKENS - 2, 77), 2, at=1)  # a fork: it reuses nothing of its pin
    (result,) = run(engine, one)
    assert result.cached_tokens == 0 and len(result.ids) == 2
    check_against_oracle("tied", one, result)


def test_a_request_that_pins_cannot_help_waits_and_the_pins_stay(make: Make) -> None:
    engine = make(**POOL)
    waiting(engine, 0)
    engine.add(turn(8, words(8 * BLOCK_TOKENS + 1, 8), 20, priority=1.0))  # all but the 4 pinned blocks
    engine.step()
    engine.add(turn(9, words(6 * BLOCK_TOKENS, 9), 2))
    engine.step()
    assert engine.stats().waiting == 1 and engine.stats().evicted_tokens == 0
    assert len(drain(engine)) == 2


def test_pins_dropped_in_vain_are_put_back(make: Make) -> None:
    """Two members pin the same 4 blocks, which looks like 8: dropping both frees 4 where 6 are needed."""
    engine = make(**POOL)
    first = turn(0, words(CONTEXT_TOKENS), 2)
    run(engine, first)
    run(engine, replace(first, task=replace(first.task, member=1)))
    engine.add(turn(8, words(8 * BLOCK_TOKENS + 1, 8), 20, priority=1.0))
    engine.step()
    engine.add(turn(9, words(6 * BLOCK_TOKENS, 9), 2))
    engine.step()
    assert engine.stats().waiting == 1 and engine.stats().evicted_tokens == 0
    assert engine.stats().held_tokens == 4 * BLOCK_TOKENS
    engine.abort(task(9), 0)
    drain(engine)
    assert comes_back(engine, 0) == 4 * BLOCK_TOKENS


def test_release_evicts_first(make: Make) -> None:
    engine = make(**POOL)
    waiting(engine, 0, 1, 2)
    run(engine, turn(9, words(40, 9), 2, retain=False))  # 2 blocks, the free one and the last of task 0, whose pin goes
    assert engine.stats().evicted_tokens == 4 * BLOCK_TOKENS
    engine.release(task(1))
    assert engine.stats().resident_tokens == 4 * BLOCK_TOKENS
    run(engine, turn(8, words(6 * BLOCK_TOKENS - 2, 8), 2, retain=False))  # those 2 and the 4 of task 1
    assert comes_back(engine, 0) == 3 * BLOCK_TOKENS  # what was dropped, not released, is still there
    engine.release(task(0))
    assert comes_back(engine, 1) == 0


def test_release_of_a_running_turn_holds_nothing_afterwards(make: Make) -> None:
    engine = make(**POOL)
    engine.add(turn(0, words(CONTEXT_TOKENS), 4))
    engine.step()
    engine.release(task(0))
    drain(engine)
    assert engine.stats().resident_tokens == 0


def test_retain_of_a_running_turn_holds_it_afterwards(make: Make) -> None:
    engine = make(**POOL)
    engine.add(turn(0, words(CONTEXT_TOKENS), 4, retain=False))
    engine.step()
    engine.retain(task(0))
    drain(engine)
    assert engine.stats().held_tokens == 4 * BLOCK_TOKENS


def test_an_aborted_queued_turn_leaves_the_pin_of_the_last_one(make: Make) -> None:
    engine = make(**POOL)
    waiting(engine, 0)
    engine.add(turn(0, words(CONTEXT_TOKENS, 0), 2, at=1))
    assert engine.abort(task(0), 1) is not None
    assert engine.stats().held_tokens == 4 * BLOCK_TOKENS
    assert comes_back(engine, 0) == 4 * BLOCK_TOKENS


def test_a_released_prompt_stays_while_a_member_of_its_group_has_yet_to_start(make: Make) -> None:
    engine = make(**POOL | {"max_batch": 1})
    first = turn(0, words(CONTEXT_TOKENS), 2, retain=False)
    sibling = replace(first, task=replace(first.task, member=1))
    results = {outcome.task.member: outcome for outcome in drain_after(engine, first, sibling)}
    assert results[1].cached_tokens == 4 * BLOCK_TOKENS
    assert engine.stats().resident_tokens == 0


def drain_after(engine: VllmEngine, *turns: Turn) -> list[Any]:
    for one in turns:
        engine.add(one)
    return drain(engine)


def test_many_tasks_in_a_small_pool_are_all_right(make: Make) -> None:
    """40 tasks of three turns each, with priorities and pins, in a pool that holds three of them."""
    engine = make(**POOL)
    contexts = {number: words(20 + 3 * number, number) for number in range(40)}
    for at in range(3):
        turns = [
            turn(number, contexts[number], 6, at=at, priority=float(number % 3), retain=at < 2) for number in contexts
        ]
        for one, result in zip(turns, run(engine, *turns), strict=True):
            check_against_oracle("tied", one, result)
            number = one.task.prompt_id
            contexts[number] = [*contexts[number], *result.ids.tolist(), 3]
    assert engine.stats().resident_tokens == 0  # the last turns were not retained


@pytest.mark.parametrize("seed", range(3))
def test_random_events_leave_every_result_right_and_the_pool_within_its_budget(make: Make, seed: int) -> None:
    """Turns, hints, aborts, pauses and new weights at random, 8 tasks in a pool for three."""
    engine, draws = make(**POOL), np.random.default_rng(seed)
    contexts = {number: words(10 + 15 * number, number) for number in range(8)}
    ats, running, version = dict.fromkeys(contexts, 0), {}, 0
    finished = 0

    def took(result: TurnResult) -> None:
        one = running.pop(result.task.prompt_id)
        check_against_oracle("tied", one, result)
        if result.finish_reason != "aborted":
            assert len(result.ids) == one.sampling.max_new_tokens
        contexts[result.task.prompt_id] += [*result.ids.tolist(), 3]

    for _ in range(160):
        number, event = int(draws.integers(8)), draws.random()
        if event < 0.25 and number not in running and len(contexts[number]) < 11 * BLOCK_TOKENS:
            priority, retain = float(draws.integers(3)), bool(draws.random() < 0.7)
            one = turn(
                number, contexts[number], int(draws.integers(1, 40)), at=ats[number], priority=priority, retain=retain
            )
            engine.add(one)
            ats[number] += 1
            running[number] = one
        elif event < 0.30:
            engine.release(task(number))
        elif event < 0.35:
            engine.retain(task(number))
        elif event < 0.39 and number in running:
            result = engine.abort(task(number), ats[number] - 1)
            assert result is not None
            took(result)
        elif event < 0.42 and version < 3:
            version += 1
            engine.load_weights(weights("tied", version))
        elif event < 0.44:
            engine.pause("keep")
            assert engine.step() == []
            engine.resume()
        else:
            for outcome in engine.step():
                assert isinstance(outcome, TurnResult)
                took(outcome)
                finished += 1
        stats = engine.stats()
        assert 0 <= stats.held_tokens <= stats.resident_tokens <= stats.budget_tokens == 13 * BLOCK_TOKENS
    for outcome in drain(engine):
        assert isinstance(outcome, TurnResult)
        took(outcome)
        finished += 1
    assert not running and finished > 10
    for number in contexts:
        engine.release(task(number))
    assert engine.stats().resident_tokens == 0
