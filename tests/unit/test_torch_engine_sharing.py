"""Members of a group compute their prompt once; waiting KV may move to host memory; growth may preempt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.engine_core_suite import drain, run
from support.tiny_models import (
    VOCAB_SIZE,
    check_against_oracle,
    engine_settings,
    model_settings,
    replace,
    state,
    turn,
    weights,
    write_weights,
)

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import TaskKey
from tiderl.data.turns import EngineStats, Turn, TurnFailure, TurnResult
from tiderl.engines.growth import FIRST_TURNS
from tiderl.engines.torch_engine import TorchEngine, build

PROMPT = [*range(2, 26)]  # 24 tokens
POISON = 60


def ready(**changes: object) -> TorchEngine:
    engine = build(engine_settings(**changes))
    engine.load_weights(weights())
    return engine


def member(number: int, ids: Sequence[int] = PROMPT, max_new_tokens: int = 3, **changes: object) -> Turn:
    """A turn of this member of group 0."""
    split = changes.pop("split", "train")
    return replace(turn(number, ids, max_new_tokens, **changes), task=TaskKey(split, 0, number))  # type: ignore[arg-type]


def check_all(turns: list[Turn], results: list[TurnResult]) -> None:
    for one, result in zip(turns, results, strict=True):
        check_against_oracle("qwen3", one, result)


# ---- a prompt is computed once


@pytest.mark.parametrize("split", ["train", "eval"])
def test_members_that_come_together_compute_their_prompt_once(split: str) -> None:
    engine = ready()
    turns = [member(n, split=split) for n in range(8)]
    results = run(engine, *turns)
    check_all(turns, results)
    assert sorted(result.cached_tokens for result in results) == [0] + [23] * 7  # the last id is always computed
    assert engine.stats().prefilled_tokens == 24 + 7


@pytest.mark.parametrize("steps", [1, 4, 8], ids=["while it prefills", "while it decodes", "after it ended"])
def test_a_member_that_comes_later_copies_from_one_that_is_there(steps: int) -> None:
    engine = ready(prefill_tokens_per_step=8)
    first, second = member(0), member(1)
    engine.add(first)
    outcomes = [outcome for _ in range(steps) for outcome in engine.step()]
    engine.add(second)
    outcomes += drain(engine)
    results = {outcome.task: outcome for outcome in outcomes}
    check_all([first, second], [results[first.task], results[second.task]])  # type: ignore[list-item]
    assert results[second.task].cached_tokens == 23  # type: ignore[union-attr]


def test_only_the_common_ids_are_shared() -> None:
    engine = ready()
    turns = [member(0), member(1, [*PROMPT[:20], 40, 41, 42]), member(2, [7, *PROMPT[1:]])]
    results = run(engine, *turns)
    check_all(turns, results)
    assert [result.cached_tokens for result in results] == [0, 20, 0]


def test_tasks_of_other_groups_and_splits_share_nothing() -> None:
    engine = ready()
    turns = [turn(0, PROMPT), turn(1, PROMPT), replace(turn(0, PROMPT), task=TaskKey("eval", 0, 0))]
    assert [result.cached_tokens for result in run(engine, *turns)] == [0, 0, 0]


def test_new_weights_cost_one_prefill_of_the_prompt() -> None:
    engine = ready()
    turns = [member(n, max_new_tokens=8) for n in range(4)]
    for one in turns:
        engine.add(one)
    while engine.stats().generated_tokens < 4 * 2:
        engine.step()
    before = engine.stats()
    sampled = [live.length - 24 for live in engine._rows.lives]
    engine.load_weights(weights(version=1))
    results = {outcome.task: outcome for outcome in drain(engine)}
    check_all(turns, [results[one.task] for one in turns])  # type: ignore[misc]
    # One member computes all of its context, the others what they sampled after the prompt.
    assert engine.stats().prefilled_tokens - before.prefilled_tokens == 24 + sum(sampled)


def test_a_prompt_outlives_the_members_that_computed_it_while_others_wait() -> None:
    engine = ready(max_batch=2)
    turns = [member(n, retain=False) for n in range(6)]  # by twos, and nobody keeps anything
    results = run(engine, *turns)
    check_all(turns, results)
    assert sorted(result.cached_tokens for result in results) == [0] + [23] * 5
    assert engine.stats().resident_tokens == 0  # nor does the group, when nobody waits any more


def test_a_released_tasks_prompt_stays_for_a_waiting_member() -> None:
    engine = ready(max_batch=1)
    run(engine, member(0))
    other, waiting = turn(9, [4, 5], 3, priority=1.0), member(1)
    engine.add(other)
    engine.step()
    engine.add(waiting)
    engine.release(member(0).task)
    assert engine.stats().holders == ("train/0", str(other.task))
    results = {outcome.task: outcome for outcome in drain(engine)}
    assert results[waiting.task].cached_tokens == 23  # type: ignore[union-attr]
    engine.release(other.task)
    engine.release(waiting.task)
    assert engine.stats().resident_tokens == 0


def test_when_the_first_member_is_aborted_the_next_computes_what_is_missing() -> None:
    engine = ready(prefill_tokens_per_step=8)
    turns = [member(n, retain=False) for n in range(3)]
    for one in turns:
        engine.add(one)
    engine.step()
    engine.step()  # 16 of 24 tokens; the others wait
    assert engine.stats().prefilled_tokens == 16
    assert engine.abort(turns[0].task, 0) is not None
    results = {outcome.task: outcome for outcome in drain(engine)}
    check_all(turns[1:], [results[one.task] for one in turns[1:]])  # type: ignore[misc]
    assert [results[one.task].cached_tokens for one in turns[1:]] == [16, 23]  # type: ignore[union-attr]


def test_a_member_with_nan_gives_nothing_to_the_others() -> None:
    poisoned = state("llama", 0)
    poisoned["model.embed_tokens.weight"][POISON] = float("nan")
    engine = build(engine_settings("llama"))
    engine.load_weights(write_weights(poisoned, "poisoned-member", 0))
    bad, good = member(0, [*PROMPT, POISON]), member(1, [*PROMPT, 30], stop_ids=(POISON,))
    engine.add(bad)
    engine.add(good)
    outcomes = {outcome.task: outcome for outcome in drain(engine)}
    assert isinstance(outcomes[bad.task], TurnFailure)
    result = outcomes[good.task]
    assert isinstance(result, TurnResult) and result.cached_tokens == 0
    check_against_oracle("llama", good, result)
    assert engine.stats().resident_tokens == 25 + len(result.ids) - 1  # of the good one alone


# ---- an agents' workload


def test_later_turns_prefill_only_what_is_new() -> None:
    """4 groups of 8, 5 turns, 12 new tokens a turn: at least 0.95 of the old context is cached, the prompt shared."""
    groups, members, turns = 4, 8, 5
    model = replace(model_settings(), max_context_tokens=160)
    engine = build(engine_settings(model=model, kv_budget_tokens=8000, max_batch=64))
    engine.load_weights(weights())
    rng = np.random.default_rng(0)
    histories = {(g, m): rng.integers(0, 60, 80).tolist() for g in range(groups) for m in range(members)}
    for g in range(groups):
        for m in range(members):
            histories[g, m] = histories[g, 0]
    first = engine.stats()
    for at in range(turns):
        old_tokens = sum(len(history) for history in histories.values())
        asked = {}
        for (g, m), history in histories.items():
            new = [] if at == 0 else rng.integers(0, 60, 12).tolist()
            asked[g, m] = replace(turn(8 * g + m, [*history, *new], 4, at=at), task=TaskKey("train", g, m))
        results = run(engine, *asked.values())
        for name, result in zip(asked, results, strict=True):
            histories[name] = [*asked[name].ids.tolist(), *result.ids.tolist()]
        after = engine.stats()
        cached = after.cached_tokens - first.cached_tokens
        if at == 0:
            assert after.prefilled_tokens == groups * (80 + members - 1)
        else:
            assert cached >= 0.95 * old_tokens
            # What is new, and the last token that was sampled.
            assert after.prefilled_tokens - first.prefilled_tokens == groups * members * (12 + 1)
        first = after


# ---- host memory


def test_offloaded_kv_leaves_the_budget_and_comes_back() -> None:
    engine = ready(host_kv_budget_tokens=100)
    able = engine.capabilities
    assert able.offload
    # Keys and values of 2 layers with 2 heads of 8 numbers, 4 bytes each: no machine copies these in a nanosecond.
    assert engine._rows.cache.token_bytes == 2 * 2 * 2 * 8 * 4
    assert able.reload_token_s is not None and 1e-9 < able.reload_token_s < 1e-3
    (first,) = run(engine, member(0))
    engine.offload(member(0).task)
    stats = engine.stats()
    assert (stats.resident_tokens, stats.offloaded_tokens) == (0, 26)
    again = member(0, [*PROMPT, *first.ids, 40], at=1)
    (second,) = run(engine, again)
    assert second.cached_tokens == 26
    check_against_oracle("qwen3", again, second)
    assert engine.stats().offloaded_tokens == 0


def test_offloaded_kv_survives_what_evicts_the_rest() -> None:
    engine = ready(kv_budget_tokens=40, host_kv_budget_tokens=100)
    (first,) = run(engine, turn(0, PROMPT, 3))
    engine.offload(turn(0, PROMPT).task)
    run(engine, turn(1, [*range(30, 60)], 3))
    (second,) = run(engine, turn(0, [*PROMPT, *first.ids, 40], 3, at=1))
    assert second.cached_tokens == 26


def test_a_full_host_pool_keeps_what_it_has() -> None:
    engine = ready(host_kv_budget_tokens=60)
    turns = [turn(n, PROMPT, 3) for n in range(3)]
    results = run(engine, *turns)
    engine.offload(turns[0].task)
    engine.offload(turns[1].task)
    engine.offload(turns[2].task)  # 3 x 26 > 60: it stays in the pool
    assert (engine.stats().offloaded_tokens, engine.stats().held_tokens) == (52, 26)
    engine.release(turns[2].task)
    later = [
        turn(n, [*one.ids, *result.ids, 40], 3, at=1)
        for n, (one, result) in enumerate(zip(turns, results, strict=True))
    ]
    after = run(engine, *later)
    check_all(later, after)
    assert [result.cached_tokens for result in after] == [26, 26, 0]


def test_offload_of_what_runs_or_has_no_room_changes_nothing() -> None:
    engine = ready(host_kv_budget_tokens=20)
    one = turn(0, PROMPT, 3)
    engine.add(one)
    engine.step()
    engine.offload(one.task)
    drain(engine)
    engine.offload(one.task)  # 26 > 20
    engine.offload(turn(5, [3]).task)
    stats = engine.stats()
    assert (stats.resident_tokens, stats.offloaded_tokens) == (26, 0)


def test_new_weights_and_release_forget_offloaded_kv() -> None:
    engine = ready(host_kv_budget_tokens=100)
    for forget in (lambda: engine.load_weights(weights(version=1)), lambda: engine.release(turn(0, PROMPT).task)):
        run(engine, turn(0, PROMPT, 3))
        engine.offload(turn(0, PROMPT).task)
        assert engine.stats().offloaded_tokens == 26
        forget()
        assert engine.stats().offloaded_tokens == 0


def test_without_a_pool_offload_is_declared_missing() -> None:
    able = ready().capabilities  # a CPU's host memory is the same memory
    assert (able.offload, able.reload_token_s) == (False, None)


# ---- admission by expected growth, and preemption


def taught(**changes: object) -> TorchEngine:
    """An engine that has seen only turns of one token."""
    engine = ready(**changes)
    run(engine, *(turn(100 + n, [5, 6], 20, stop_ids=range(VOCAB_SIZE), retain=False) for n in range(FIRST_TURNS)))
    return engine


def steps_until_done(engine: TorchEngine) -> tuple[list[TurnResult], list[EngineStats]]:
    outcomes: list[TurnResult | TurnFailure] = []
    seen = []
    while engine.has_work():
        outcomes += engine.step()
        seen.append(engine.stats())
        assert engine._residency.committed_tokens <= seen[-1].budget_tokens
        assert seen[-1].resident_tokens <= seen[-1].budget_tokens
    return sorted(outcomes, key=lambda outcome: outcome.task), seen  # type: ignore[return-value]


def test_turns_start_on_what_they_will_probably_need() -> None:
    cautious, expecting = taught(kv_budget_tokens=60, growth_quantile=1.0), taught(kv_budget_tokens=60)
    for engine, together in ((cautious, 2), (expecting, 5)):
        for n in range(6):
            engine.add(turn(n, range(2, 12), 20, stop_ids=range(VOCAB_SIZE)))  # 10 context, up to 20 more
        engine.step()
        assert engine.stats().generated_tokens - FIRST_TURNS == together


@pytest.mark.parametrize("host", [0, 100])
def test_under_ctb_who_gives_way_goes_on_from_host_memory(host: int) -> None:
    engine = taught(kv_policy="ctb", kv_budget_tokens=60, host_kv_budget_tokens=host)
    before = engine.stats().prefilled_tokens
    turns = [turn(n, range(2 + n, 14 + n), 30, retain=False) for n in range(3)]
    check_all(turns, run(engine, *turns))
    stats = engine.stats()
    again = stats.prefilled_tokens - before - 3 * 12
    assert stats.preemptions > 0 and stats.offloaded_tokens == 0
    # With the host, all but the token that was sampled last and has no KV yet.
    assert again == stats.preemptions if host else again > 12 * stats.preemptions


def test_who_gives_way_is_the_most_junior_and_keeps_its_tokens() -> None:
    engine = taught(kv_budget_tokens=60)
    turns = [turn(n, range(2 + n, 14 + n), 30, priority=float(n == 2)) for n in range(3)]
    for one in turns:
        engine.add(one)
    results, seen = steps_until_done(engine)
    check_all(turns, results)  # the same uniforms go on after a preemption
    assert [len(result.ids) for result in results] == [30, 30, 30]
    assert engine.stats().preemptions >= 1
    # Tokens are never sampled twice: each adds one.
    assert engine.stats().generated_tokens == FIRST_TURNS + 90
    assert max(stats.running for stats in seen) == 3
    # Task 2 has the larger priority, then task 0 came first.
    assert results[2].decode_s < results[0].decode_s < results[1].decode_s


def test_one_turn_that_needs_the_whole_budget_ends() -> None:
    engine = taught(kv_budget_tokens=48)
    turns = [turn(0, range(2, 12), 38), turn(1, range(3, 13), 38)]  # exactly 48 each
    for one in turns:
        engine.add(one)
    results, _ = steps_until_done(engine)
    check_all(turns, results)


def test_waiting_tasks_are_evicted_before_a_turn_is_preempted() -> None:
    engine = taught(kv_budget_tokens=60)
    run(engine, turn(0, PROMPT, 3))  # holds 26
    run(engine, turn(1, range(2, 12), 30))
    assert engine.stats().preemptions == 0
    assert str(turn(0, PROMPT).task) not in engine.stats().holders


def test_new_weights_reach_a_preempted_turn() -> None:
    engine = taught(kv_budget_tokens=60)
    turns = [turn(n, range(2 + n, 14 + n), 30) for n in range(3)]
    for one in turns:
        engine.add(one)
    while not engine.stats().preemptions:
        engine.step()
    engine.load_weights(weights(version=1))
    results, _ = steps_until_done(engine)
    check_all(turns, results)
    assert {tuple(np.unique(result.versions)) for result in results} == {(0, 1)}


def test_a_preempted_turn_can_be_aborted() -> None:
    engine = taught(kv_budget_tokens=60)
    for n in range(3):
        engine.add(turn(n, range(2 + n, 14 + n), 30))
    while not engine.stats().preemptions:
        engine.step()
    assert engine.stats().waiting == 1
    result = engine.abort(turn(2, [1]).task, 0)
    assert result is not None and 0 < len(result.ids) < 30
    assert engine.stats().waiting == 0


@pytest.mark.parametrize("quantile", [0.0, -1.0, 1.1])
def test_a_quantile_of_growth_that_is_none_is_refused(quantile: float) -> None:
    with pytest.raises(ConfigurationError, match="growth_quantile"):
        build(engine_settings(growth_quantile=quantile))


# ---- decoding goes on, memory stays


def test_beside_decoding_rows_a_prompt_is_prefilled_in_smaller_chunks() -> None:
    engine = ready(prefill_tokens_per_step=20, prefill_tokens_beside_decoding=8)
    engine.add(turn(0, PROMPT, 12))
    engine.step()
    assert engine.stats().prefilled_tokens == 20  # nobody decodes
    engine.step()
    engine.add(turn(1, PROMPT, 1))
    chunks = []
    while engine.stats().running + engine.stats().waiting == 2:
        before = engine.stats()
        engine.step()
        assert engine.stats().generated_tokens > before.generated_tokens
        chunks.append(engine.stats().prefilled_tokens - before.prefilled_tokens)
    assert chunks == [8, 8, 8]


def many_turns(engine: TorchEngine, count: int) -> None:
    """Tasks of one or two turns, half of them never released, some aborted while they wait or run."""
    rng = np.random.default_rng(0)
    for n in range(count):
        one = replace(turn(n, rng.integers(0, 60, 18), 2), task=TaskKey("train", n // 4, n % 4))
        engine.add(one)
        if n % 7 == 0:
            engine.abort(one.task, 0)
        if n % 2 == 0:
            engine.offload(TaskKey("train", (n - 9) // 4, (n - 9) % 4))
        if n % 2 == 1 and n > 40:
            engine.release(TaskKey("train", (n - 40) // 4, (n - 40) % 4))
        if n % 500 == 0:
            engine.load_weights(weights(version=n // 500 % 3))
        if n % 4 == 0:
            engine.step()


def held_things(engine: TorchEngine) -> dict[str, int]:
    """Everything in the engine that could grow with the number of turns."""
    book = engine._residency
    return {
        "live": len(engine._live),
        "queued": len(engine._admission._queue),
        "entries": len(book._held),
        "groups": len(book._groups),
        "tokens": book.committed_tokens,
        "offloaded": len(engine._host._entries),
        "cache": engine._rows.cache._store.numel(),
        "ended": len(engine._ended),
    }


@pytest.mark.parametrize("turns", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_tasks_that_are_never_released_leave_a_bounded_trace(turns: int) -> None:
    engine = ready(kv_budget_tokens=200, max_batch=8, host_kv_budget_tokens=100)
    many_turns(engine, turns)
    drain(engine)
    things = held_things(engine)
    assert things["live"] == things["queued"] == things["ended"] == 0
    assert things["tokens"] <= 200 and things["entries"] <= 200 // 18 and things["groups"] <= things["entries"]
    assert things["offloaded"] <= 100 // 18
    rows, tokens = engine._rows.cache._store.shape[2], engine._rows.cache._store.shape[4]
    assert rows <= 8 and tokens <= 64
