"""The embedded engine under `ctb`: a task is held whole, by priority, and its group's prompt outlives it."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine_core_suite import drain, run
from support.tiny_models import check_against_oracle, engine_settings, replace, task, turn, weights

from tiderl.data.records import TaskKey
from tiderl.data.turns import Turn
from tiderl.engines.torch_engine import TorchEngine, build

PROMPT = [*range(2, 26)]  # 24 tokens


def ready(kv_policy: str = "ctb", **changes: object) -> TorchEngine:
    engine = build(engine_settings(kv_policy=kv_policy, **changes))
    engine.load_weights(weights())
    return engine


def other(number: int, context: int, **changes: object) -> Turn:
    """A turn of a task that shares nothing, of so many tokens and 3 more: it holds `context` + 2."""
    return turn(number, [(number * 7 + i) % 60 for i in range(context)], 3, **changes)  # type: ignore[arg-type]


def cached_next(engine: TorchEngine, numbers: list[int], context: int) -> list[int]:
    """What the next turns of these tasks find, asked one after the other and kept by nobody."""
    found = []
    for number in numbers:
        again = replace(other(number, context, retain=False), turn=1)
        (result,) = run(engine, again)
        check_against_oracle("qwen3", again, result)
        found.append(result.cached_tokens)
    return found


def test_the_lowest_priority_goes_first_whatever_was_used_last() -> None:
    engine = ready(kv_budget_tokens=90)
    for number, priority in enumerate((1.0, 0.0, 0.0)):
        run(engine, other(number, 20, priority=priority))  # 22 each
    run(engine, other(9, 25, retain=False))  # 28, 24 are free
    stats = engine.stats()
    assert (stats.held_tokens, stats.resident_tokens, stats.evicted_tokens) == (44, 44, 22)
    assert cached_next(engine, [0, 1, 2], 20) == [19, 0, 19]


@pytest.mark.parametrize(("kv_policy", "found"), [("lru", [0, 19, 19]), ("ctb", [19, 0, 19])])
def test_a_hint_protects_a_task_only_where_tasks_are_the_unit(kv_policy: str, found: list[int]) -> None:
    engine = ready(kv_policy, kv_budget_tokens=90)
    for number in range(3):
        run(engine, other(number, 20))
    engine.retain(task(0))
    run(engine, other(9, 25, retain=False))
    assert engine.stats().evicted_tokens == 22
    assert cached_next(engine, [0, 1, 2], 20) == found


def test_a_task_whose_next_turn_has_come_goes_after_those_that_still_wait() -> None:
    engine = ready(kv_budget_tokens=90, max_batch=1)
    for number in range(3):
        run(engine, other(number, 20))
    again = replace(other(0, 20), turn=1)
    engine.add(other(9, 25, retain=False, priority=1.0))
    engine.add(again)  # it waits for the row
    outcomes = {outcome.task: outcome for outcome in drain(engine)}
    assert outcomes[task(0)].cached_tokens == 19  # type: ignore[union-attr]
    assert str(task(1)) not in engine.stats().holders


def test_new_weights_release_and_offload_end_the_holding() -> None:
    engine = ready(host_kv_budget_tokens=100)
    for number in range(3):
        run(engine, other(number, 20))
    assert engine.stats().held_tokens == 66
    engine.release(task(0))
    assert engine.stats().held_tokens == 44
    engine.offload(task(1))
    assert (engine.stats().held_tokens, engine.stats().offloaded_tokens) == (22, 22)
    engine.load_weights(weights(version=1))
    stats = engine.stats()
    assert (stats.held_tokens, stats.resident_tokens, stats.offloaded_tokens, stats.evicted_tokens) == (0, 0, 0, 0)


def test_an_aborted_turn_is_held_too() -> None:
    engine = ready()
    engine.add(turn(0, PROMPT, 12))
    while engine.stats().generated_tokens < 4:
        engine.step()
    assert engine.stats().held_tokens == 0
    assert engine.abort(task(0), 0) is not None
    assert engine.stats().held_tokens == engine.stats().resident_tokens == 24 + 3  # the fourth was never computed


@pytest.mark.parametrize(("kv_policy", "host", "cached"), [("ctb", 100, 22), ("ctb", 20, 0), ("lru", 100, 0)])
def test_what_pressure_takes_of_tasks_goes_to_host_memory(kv_policy: str, host: int, cached: int) -> None:
    """22 positions of each of three are held, of 72: for 28 more the first of them goes."""
    engine = ready(kv_policy, kv_budget_tokens=72, max_batch=1, host_kv_budget_tokens=host)
    first, *_ = (run(engine, other(number, 20))[0] for number in range(3))
    run(engine, other(9, 25, retain=False, priority=1.0))
    stats = engine.stats()
    assert (stats.evicted_tokens, stats.offloaded_tokens) == (22, cached)
    again = replace(other(0, 20), turn=1, ids=np.array([*other(0, 20).ids, *first.ids, 40], dtype=np.int32))
    (second,) = run(engine, again)
    assert second.cached_tokens == cached
    check_against_oracle("qwen3", again, second)
    assert engine.stats().offloaded_tokens == 0


def test_pressure_leaves_a_slow_host_alone() -> None:
    engine = ready(kv_budget_tokens=72, max_batch=1, host_kv_budget_tokens=100)
    engine._reload_token_s = 1e3
    for number in range(3):
        run(engine, other(number, 20))
    run(engine, other(9, 25, retain=False, priority=1.0))
    assert (engine.stats().evicted_tokens, engine.stats().offloaded_tokens) == (22, 0)


def member(number: int, **changes: object) -> Turn:
    """A turn of a member of group 0: the same prompt for all."""
    return replace(turn(number, PROMPT, 3, **changes), task=TaskKey("train", 0, number))  # type: ignore[arg-type]


@pytest.mark.parametrize(("kv_policy", "cached"), [("lru", 0), ("ctb", 23)])
def test_a_held_task_that_goes_leaves_its_prompt_to_members_that_are_to_start(kv_policy: str, cached: int) -> None:
    engine = ready(kv_policy, kv_budget_tokens=60, max_batch=1)
    run(engine, member(0))  # holds 26
    engine.add(other(9, 33, retain=False, priority=1.0))  # 36: 24 are left, the prompt but for its last id needs 23
    engine.add(member(1))
    outcomes = {outcome.task: outcome for outcome in drain(engine)}
    result = outcomes[member(1).task]
    assert result.cached_tokens == cached  # type: ignore[union-attr]
    check_against_oracle("qwen3", member(1), result)  # type: ignore[arg-type]
    assert engine.stats().evicted_tokens == 26
    engine.release(member(1).task)
    assert engine.stats().resident_tokens == 0


def test_a_prompt_is_kept_only_where_it_is_in_nobodys_way() -> None:
    engine = ready(kv_budget_tokens=60, max_batch=1)
    run(engine, member(0))
    engine.add(other(9, 35, retain=False, priority=1.0))  # 38: 22 are left
    engine.add(member(1))
    outcomes = {outcome.task: outcome for outcome in drain(engine)}
    assert outcomes[member(1).task].cached_tokens == 0  # type: ignore[union-attr]


def test_an_offloaded_task_leaves_its_prompt_to_members_that_are_to_start() -> None:
    engine = ready(max_batch=1, host_kv_budget_tokens=100)
    run(engine, member(0))
    engine.add(other(9, 20, priority=1.0))
    engine.step()
    engine.add(member(1))
    engine.offload(member(0).task)
    outcomes = {outcome.task: outcome for outcome in drain(engine)}
    assert outcomes[member(1).task].cached_tokens == 23  # type: ignore[union-attr]
