"""What every `EngineCore` promises, as checks over a factory; an implementation's test runs `CHECKS`, each afresh.

Only the port is used: nothing here knows how an engine computes, only what the runtime relies on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from support.tiny_models import task, turn

from tiderl.data.errors import BudgetError, ConfigurationError, RequestTooLarge
from tiderl.data.records import WeightHandle
from tiderl.data.turns import Turn, TurnFailure, TurnResult
from tiderl.runtime.ports import EngineCore

STEPS_BOUND = 2000
CONTEXT = [5, 9, 12, 33, 7]


@dataclass(frozen=True)
class Subject:
    """A fresh engine without weights: vocabulary at least 64, context 48 blocks, KV budget `budget_tokens`."""

    engine: EngineCore
    weights: Callable[[int], WeightHandle]
    budget_tokens: int


Make = Callable[[int], Subject]  # KV budget in tokens -> engine; `block_tokens` where it keeps KV in blocks


def block_of(make: Make) -> int:
    """Tokens of one block of its KV: what a check holds, frees or fills is so many times as long."""
    return getattr(make, "block_tokens", 1)


def ready(make: Make, budget_tokens: int = 400) -> EngineCore:
    subject = make(budget_tokens)
    subject.engine.load_weights(subject.weights(0))
    return subject.engine


def drain(engine: EngineCore) -> list[TurnResult | TurnFailure]:
    """Step until there is no work; the budget holds after every step (I4)."""
    outcomes: list[TurnResult | TurnFailure] = []
    for _ in range(STEPS_BOUND):
        if not engine.has_work():
            return outcomes
        outcomes += engine.step()
        stats = engine.stats()
        assert 0 <= stats.resident_tokens <= stats.budget_tokens
    raise AssertionError(f"still at work after {STEPS_BOUND} steps: {engine.stats()}")


def run(engine: EngineCore, *turns: Turn) -> list[TurnResult]:
    """The results of these turns, run together, in their order."""
    for one in turns:
        engine.add(one)
    outcomes = {(outcome.task, outcome.turn): outcome for outcome in drain(engine)}
    results = [outcomes[(one.task, one.turn)] for one in turns]
    assert all(isinstance(result, TurnResult) for result in results), results
    return results  # type: ignore[return-value]


def check_every_turn_gets_one_result_of_its_length(make: Make) -> None:
    engine = ready(make)
    results = run(engine, *(turn(n, CONTEXT, max_new_tokens=1 + n) for n in range(6)))
    for n, result in enumerate(results):
        assert result.finish_reason == "length"
        assert len(result.ids) == len(result.logprobs) == len(result.versions) == 1 + n
        assert (result.ids.dtype, result.logprobs.dtype, result.versions.dtype) == (
            np.int32,
            np.float32,
            np.int32,
        )
        assert (result.logprobs <= 0).all() and (result.versions == 0).all()
    assert engine.stats().running == engine.stats().waiting == 0


def check_a_stop_id_ends_the_turn_and_is_included(make: Make) -> None:
    (free,) = run(ready(make), turn(0, CONTEXT, 8))
    first = int(free.ids[0])
    (stopped,) = run(ready(make), turn(0, CONTEXT, 8, stop_ids=(first,)))
    assert stopped.finish_reason == "stop"
    assert stopped.ids.tolist() == [first]


def check_draws_do_not_depend_on_the_batch(make: Make) -> None:
    (alone,) = run(ready(make), turn(3, CONTEXT, 6))
    crowd = run(ready(make), *(turn(n, [2 + n, *CONTEXT][n % 3 :] if n != 3 else CONTEXT, 6) for n in range(8)))
    assert crowd[3].ids.tolist() == alone.ids.tolist()
    np.testing.assert_allclose(crowd[3].logprobs, alone.logprobs, atol=1e-5)


def check_another_seed_draws_other_tokens(make: Make) -> None:
    engine = ready(make)
    results = run(engine, *(turn(n, CONTEXT, 8, seed=n) for n in range(4)))
    assert len({tuple(result.ids.tolist()) for result in results}) > 1


def check_a_later_turn_reuses_what_is_held(make: Make) -> None:
    engine = ready(make)
    context = CONTEXT * block_of(make)
    (first,) = run(engine, turn(0, context, 4))
    history = [*context, *first.ids.tolist()]
    (second,) = run(engine, turn(0, [*history, 2, 3], 4, at=1))
    assert second.cached_tokens >= 0.8 * len(history)


def check_a_turn_that_is_not_retained_holds_nothing(make: Make) -> None:
    engine = ready(make)
    run(engine, turn(0, CONTEXT * block_of(make), 4, retain=False))
    assert engine.stats().resident_tokens == 0


def check_release_frees_and_is_idempotent(make: Make) -> None:
    engine = ready(make)
    run(engine, turn(0, CONTEXT * block_of(make), 4))
    if engine.capabilities.retain:
        assert engine.stats().resident_tokens > 0
    engine.release(task(0))
    engine.release(task(0))
    assert engine.stats().resident_tokens == 0


def check_tokens_carry_the_version_that_made_them(make: Make) -> None:
    subject = make(400)
    engine = subject.engine
    assert engine.stats().version == -1
    engine.load_weights(subject.weights(0))
    engine.add(turn(0, CONTEXT, 12))
    while engine.stats().generated_tokens < 3:
        engine.step()
    engine.load_weights(subject.weights(1))
    assert engine.stats().version == 1
    (result,) = drain(engine)
    assert isinstance(result, TurnResult)
    assert len(result.ids) == 12
    old = int((result.versions == 0).sum())
    assert 3 <= old < 12
    assert result.versions.tolist() == [0] * old + [1] * (12 - old)


def check_new_weights_forget_held_kv(make: Make) -> None:
    subject = make(400)
    subject.engine.load_weights(subject.weights(0))
    context = CONTEXT * block_of(make)
    (first,) = run(subject.engine, turn(0, context, 4))
    subject.engine.load_weights(subject.weights(1))
    (second,) = run(subject.engine, turn(0, [*context, *first.ids.tolist(), 2], 4, at=1))
    assert second.cached_tokens == 0


def check_nothing_is_sampled_before_the_first_weights(make: Make) -> None:
    subject = make(400)
    subject.engine.add(turn(0, CONTEXT, 4))
    assert not subject.engine.has_work()
    assert subject.engine.step() == []
    subject.engine.load_weights(subject.weights(0))
    assert len(drain(subject.engine)) == 1


def check_abort_returns_the_tokens_so_far_once(make: Make) -> None:
    engine = ready(make)
    (whole,) = run(ready(make), turn(0, CONTEXT, 12))
    engine.add(turn(0, CONTEXT, 12))
    while engine.stats().generated_tokens < 3:
        engine.step()
    result = engine.abort(task(0), 0)
    assert result is not None and result.finish_reason == "aborted"
    assert len(result.ids) >= 3
    assert result.ids.tolist() == whole.ids[: len(result.ids)].tolist()
    assert engine.abort(task(0), 0) is None
    assert drain(engine) == []
    run(engine, turn(0, CONTEXT, 4, at=1))  # the task may come back


def check_abort_of_a_queued_turn_returns_no_tokens(make: Make) -> None:
    engine = ready(make)
    engine.add(turn(0, CONTEXT, 4))
    assert engine.abort(task(0), 1) is None  # another turn of the task
    assert engine.abort(task(1), 0) is None  # another task
    result = engine.abort(task(0), 0)
    assert result is not None and result.finish_reason == "aborted"
    assert len(result.ids) == len(result.logprobs) == len(result.versions) == 0
    assert not engine.has_work()


def check_pause_keep_holds_and_resumes(make: Make) -> None:
    (whole,) = run(ready(make), turn(0, CONTEXT, 10))
    engine = ready(make)
    engine.add(turn(0, CONTEXT, 10))
    while engine.stats().generated_tokens < 2:
        engine.step()
    assert engine.pause("keep") == []
    assert engine.pause("keep") == []
    assert engine.stats().paused and not engine.has_work()
    generated = engine.stats().generated_tokens
    assert engine.step() == [] and engine.stats().generated_tokens == generated
    engine.add(turn(1, CONTEXT, 2))  # taken, and started on resume
    engine.resume()
    results = {outcome.task: outcome for outcome in drain(engine)}
    assert results[task(0)].ids.tolist() == whole.ids.tolist()  # type: ignore[union-attr]
    assert set(results) == {task(0), task(1)}


def check_pause_abort_returns_every_turn(make: Make) -> None:
    engine = ready(make)
    for n in range(5):
        engine.add(turn(n, CONTEXT, 10))
    engine.step()
    engine.pause("keep")
    results = engine.pause("abort")
    assert sorted(result.task for result in results) == [task(n) for n in range(5)]
    assert {result.finish_reason for result in results} == {"aborted"}
    assert engine.pause("abort") == []
    engine.resume()
    assert not engine.has_work()


def check_zero_new_tokens_end_at_once(make: Make) -> None:
    engine = ready(make)
    (result,) = run(engine, turn(0, CONTEXT, 0))
    assert result.finish_reason == "length" and len(result.ids) == 0
    assert engine.stats().prefilled_tokens == 0


def check_what_can_never_fit_is_refused(make: Make) -> None:
    block = block_of(make)
    engine = ready(make, 20 * block)
    with pytest.raises(RequestTooLarge, match=f"KV budget of {20 * block}"):
        engine.add(turn(0, [3] * (20 * block - 3), 4))
    (result,) = run(engine, turn(0, [3] * (20 * block - 4), 4))  # exactly the budget
    assert len(result.ids) == 4
    with pytest.raises(RequestTooLarge, match=f"context of {48 * block}"):
        ready(make, 400 * block).add(turn(0, [3] * (48 * block - 3), 4))
    assert not engine.has_work()


def check_two_turns_of_one_task_are_refused(make: Make) -> None:
    engine = ready(make)
    engine.add(turn(0, CONTEXT, 4))
    with pytest.raises(BudgetError, match="turn 0 of this task is still running"):
        engine.add(turn(0, [*CONTEXT, 3], 4, at=1))
    assert len(drain(engine)) == 1


def check_a_cut_distribution_is_refused(make: Make) -> None:
    engine = ready(make)
    for cut in ({"top_p": 0.9}, {"top_k": 5}):
        with pytest.raises(ConfigurationError, match="top_"):
            engine.add(turn(0, CONTEXT, 4, **cut))
    assert not engine.has_work()


def check_more_turns_than_fit_are_all_served(make: Make) -> None:
    engine = ready(make, 30)
    results = run(engine, *(turn(n, CONTEXT, 5) for n in range(12)))
    assert [len(result.ids) for result in results] == [5] * 12


def check_larger_priority_first_then_arrival(make: Make) -> None:
    engine = ready(make, 12)  # one turn at a time
    for n, priority in enumerate((0.0, 1.0, 0.0, 2.0)):
        engine.add(turn(n, CONTEXT, 5, priority=priority))
    assert [outcome.task for outcome in drain(engine)] == [task(3), task(1), task(0), task(2)]


def check_stats_name_the_holders_largest_first(make: Make) -> None:
    block = block_of(make)
    engine = ready(make, 400 * block)
    run(engine, turn(0, CONTEXT * block, 1), turn(1, CONTEXT * 2 * block, 1))
    if engine.capabilities.retain:
        assert engine.stats().holders == (str(task(1)), str(task(0)))


def check_offloaded_kv_leaves_the_pool_and_comes_back(make: Make) -> None:
    engine = ready(make)
    if not engine.capabilities.offload:
        pytest.skip("this engine says that it cannot offload")
    (first,) = run(engine, turn(0, CONTEXT * 4, 4))
    history = [*CONTEXT * 4, *first.ids.tolist()]
    held = engine.stats().held_tokens
    engine.offload(task(0))
    stats = engine.stats()
    assert stats.held_tokens == stats.resident_tokens == 0 and stats.offloaded_tokens == held > 0
    (second,) = run(engine, turn(0, [*history, 2, 3], 4, at=1))
    assert second.cached_tokens >= 0.8 * len(history)
    assert engine.stats().offloaded_tokens == 0
    engine.offload(task(0))
    engine.release(task(0))
    assert engine.stats().offloaded_tokens == 0


CHECKS = tuple(check for name, check in sorted(globals().items()) if name.startswith("check_"))
