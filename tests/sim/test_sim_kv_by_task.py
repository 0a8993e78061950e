"""The simulated engine under `ctb`: tasks are held whole, go by priority, and come back from host memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.cost import cost_model
from tiderl.cost.model import CostModel
from tiderl.data.errors import RankLost
from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.settings import EngineSettings, ModelSettings
from tiderl.data.turns import EngineStats, Sampling, Turn, TurnResult
from tiderl.sim.engine import SimEngine
from tiderl.sim.held import STALE_MARKS, HeldTasks
from tiderl.sim.kv import BlockPool, Prefix, Shared
from tiderl.sim.loop import run_virtual
from tiderl.sim.ranks import SimRank

MODEL = ModelSettings(path="scratch", vocab_size=64, max_context_tokens=4096, pad_id=0, stop_ids=(1,))
RELOAD_S = 2e-5
COST = CostModel(
    iteration_s=1e-2,
    sequence_s=1e-3,
    context_token_s=1e-5,
    prefill_token_s=1e-4,
    max_batch=1000,
    kv_capacity_tokens=1_000_000,
    reference_token_s=0.0,
    forward_token_s=0.0,
    backward_token_s=0.0,
    optimizer_s=0.0,
    publish_s=0.0,
    load_s=0.07,
    swap_one_way_s=0.0,
    checkpoint_s=0.0,
    weight_bytes=1000,
    kv_reload_token_s=RELOAD_S,
)


def key(task: int) -> TaskKey:
    return TaskKey("train", task, 0)


def turn_of(
    task: int, turn: int, context: int, max_new: int = 1, *, priority: float = 0.0, retain: bool = True
) -> Turn:
    ids = np.broadcast_to(np.int32(0), (context,))
    return Turn(key(task), turn, ids, Sampling(1.0, max_new, ()), 10_000, priority=priority, retain=retain)


@dataclass(frozen=True)
class Talk:
    """Every turn says all that it may. `shared`: what tasks have in common, by task."""

    shared: dict[int, Shared] = field(default_factory=dict)

    def action_tokens(self, key: TaskKey, turn: int) -> int:
        return 1000

    def shared_prompt(self, key: TaskKey) -> Shared:
        return self.shared.get(key.prompt_id, ())


def engine_of(
    budget: int,
    *,
    kv_policy: str = "ctb",
    shared: dict[int, Shared] | None = None,
    host: int | None = None,
    cost: CostModel = COST,
) -> SimEngine:
    engine = EngineSettings(
        MODEL,
        budget,
        kv_block_tokens=10,
        kv_policy=kv_policy,
        host_kv_budget_tokens=host,
        prefill_tokens_beside_decoding=2048,
    )
    return SimEngine(0, [SimRank(0)], cost, engine, Talk(shared or {}), {})


T = TypeVar("T")


def play(engine: SimEngine, main: Callable[[SimEngine], Awaitable[T]]) -> T:
    async def whole() -> T:
        await engine.load_weights(WeightHandle(0, "v0", 1000))
        return await main(engine)

    return run_virtual(whole)


async def seconds_of(asked: Awaitable[TurnResult]) -> tuple[float, TurnResult]:
    start = asyncio.get_running_loop().time()
    result = await asked
    return asyncio.get_running_loop().time() - start, result


def iteration_s(prefilled: int) -> float:
    """Of one that prefills so many positions and samples one token."""
    return 1e-2 + 1e-3 + prefilled * 1e-4


# ------------------------------------------------------------------------------ who makes room


def test_by_task_the_lowest_priority_goes_whole_and_alone() -> None:
    async def main(engine: SimEngine) -> tuple[list[int], list[int]]:
        for task, priority in enumerate((1.0, 0.0, 0.0)):  # 9 whole blocks of each stay, of 30
            await engine.generate(turn_of(task, 0, 91, priority=priority))
        await engine.generate(turn_of(9, 0, 81, retain=False))  # 9 blocks: 6 are missing
        stats = engine.stats
        cached = [(await engine.generate(turn_of(task, 1, 92, retain=False))).cached_tokens for task in range(3)]
        return [stats.resident_tokens, stats.held_tokens, stats.evicted_tokens], cached

    tokens, cached = play(engine_of(300, host=0), main)
    assert tokens == [180, 180, 90]
    assert cached == [90, 0, 90], "task 1 came before task 2, and task 0 is worth more"


def test_what_pressure_takes_goes_to_host_memory_and_is_loaded_from_there() -> None:
    async def main(engine: SimEngine) -> tuple[list[int], int, float, int]:
        for task, priority in enumerate((1.0, 0.0, 0.0)):
            await engine.generate(turn_of(task, 0, 91, priority=priority))
        await engine.generate(turn_of(9, 0, 81, retain=False))
        stats = engine.stats
        seconds, again = await seconds_of(engine.generate(turn_of(1, 1, 92, retain=False)))
        return (
            [stats.held_tokens, stats.evicted_tokens, stats.offloaded_tokens],
            again.cached_tokens,
            seconds,
            (engine.stats.offloaded_tokens),
        )

    tokens, cached, seconds, left = play(engine_of(300), main)
    assert (tokens, cached, left) == ([180, 90, 90], 90, 0)
    assert seconds == pytest.approx(90 * RELOAD_S + iteration_s(2)), "loaded, and then two positions computed"


def test_pressure_leaves_a_host_alone_that_loads_no_faster_than_computing() -> None:
    async def main(engine: SimEngine) -> tuple[int, int]:
        for task in range(3):
            await engine.generate(turn_of(task, 0, 91))
        await engine.generate(turn_of(9, 0, 81, retain=False))
        return engine.stats.evicted_tokens, engine.stats.offloaded_tokens

    for reload_s, offloaded in ((COST.prefill_token_s, 0), (0.99 * COST.prefill_token_s, 90)):
        engine = engine_of(300, cost=replace(COST, kv_reload_token_s=reload_s))
        assert play(engine, main) == (90, offloaded), reload_s


@pytest.mark.parametrize(("host", "computed"), [(0, 62 + 51), (100, 62 + 1)], ids=["none", "enough"])
def test_a_running_turn_that_gives_way_does_not_compute_again_what_the_host_has(host: int, computed: int) -> None:
    """Two grow from 31 to 71 positions in a pool of 11 blocks. At 51 both need their sixth: who came last has computed
    50, and its next token makes 51."""

    async def main(engine: SimEngine) -> tuple[int, int, int]:
        turns = (engine.generate(turn_of(task, 0, 31, 41, retain=False)) for task in range(2))
        both = await asyncio.gather(*turns)
        stats = engine.stats
        assert [len(result.ids) for result in both] == [41, 41]
        return stats.preemptions, stats.prefilled_tokens, stats.offloaded_tokens

    assert play(engine_of(110, host=host), main) == (1, computed, 0)


def test_at_request_level_no_hint_protects() -> None:
    async def main(engine: SimEngine) -> tuple[int, int]:
        for task, priority in enumerate((1.0, 0.0, 0.0)):
            await engine.generate(turn_of(task, 0, 91, priority=priority))
        engine.retain(key(0))
        await engine.generate(turn_of(9, 0, 81, retain=False))
        evicted = engine.stats.evicted_tokens
        return evicted, (await engine.generate(turn_of(0, 1, 92))).cached_tokens

    # The least recently used loses 6 of its 9 blocks, from its end.
    assert play(engine_of(300, kv_policy="lru"), main) == (60, 30)


def test_a_hint_makes_a_held_task_the_last_of_its_priority() -> None:
    async def main(engine: SimEngine) -> list[int]:
        for task in range(3):
            await engine.generate(turn_of(task, 0, 91))
        engine.retain(key(0))
        await engine.generate(turn_of(9, 0, 81, retain=False))
        return [(await engine.generate(turn_of(task, 1, 92, retain=False))).cached_tokens for task in range(3)]

    assert play(engine_of(300, host=0), main) == [90, 0, 90]


@pytest.mark.parametrize(
    ("kv_policy", "context", "cached"),
    [("lru", 211, 0), ("ctb", 211, 40), ("ctb", 251, 40), ("ctb", 261, 30)],
    ids=["request level", "while a member is held", "after the last member went", "then it is cache as any other"],
)
def test_a_prompt_stays_for_members_that_are_to_start(kv_policy: str, context: int, cached: int) -> None:
    async def main(engine: SimEngine) -> int:
        await engine.generate(turn_of(0, 0, 51, priority=1.0))  # 4 blocks of the prompt and 1 of its own
        for task in (2, 3):
            await engine.generate(turn_of(task, 0, 91))  # 9 blocks each
        await engine.generate(turn_of(9, 0, context, retain=False))  # of 30 blocks
        return (await engine.generate(turn_of(1, 0, 51))).cached_tokens

    shared: dict[int, Shared] = dict.fromkeys((0, 1), (("group", 45),))
    assert play(engine_of(300, kv_policy=kv_policy, shared=shared), main) == cached


def test_a_pool_full_of_held_tasks_is_never_stuck() -> None:
    async def main(engine: SimEngine) -> EngineStats:
        for task in range(5):
            await engine.generate(turn_of(task, 0, 60, priority=float(task)))
        await engine.generate(turn_of(9, 0, 290, max_new=10, priority=-1.0))  # all of it, by the least of them
        return engine.stats

    stats = play(engine_of(300), main)
    assert (stats.held_tokens, stats.evicted_tokens) == (290, 5 * 60)


# ------------------------------------------------------------------------------ host memory


def test_an_offloaded_task_comes_back_for_the_time_of_the_copy() -> None:
    async def main(engine: SimEngine) -> tuple[EngineStats, float, TurnResult, int]:
        await engine.generate(turn_of(0, 0, 101))
        engine.offload(key(0))
        stats = engine.stats
        seconds, result = await seconds_of(engine.generate(turn_of(0, 1, 111)))
        return stats, seconds, result, engine.stats.offloaded_tokens

    engine = engine_of(300)
    assert engine.capabilities.offload
    stats, seconds, result, offloaded = play(engine, main)
    assert (stats.resident_tokens, stats.held_tokens, stats.offloaded_tokens) == (0, 0, 100)
    assert result.cached_tokens == 100 and offloaded == 0
    assert seconds == pytest.approx(100 * RELOAD_S + iteration_s(11))
    assert result.prefill_s == pytest.approx(seconds) and result.queued_s == 0


def test_copies_follow_each_other_over_one_link() -> None:
    async def main(engine: SimEngine) -> list[float]:
        for task in range(2):
            await engine.generate(turn_of(task, 0, 101))
            engine.offload(key(task))
        both = await asyncio.gather(*(seconds_of(engine.generate(turn_of(task, 1, 111))) for task in range(2)))
        return [seconds for seconds, _ in both]

    first = 100 * RELOAD_S + iteration_s(11)  # the other's copy is there before it ends
    assert play(engine_of(300), main) == pytest.approx([first, first + iteration_s(11)])


def test_the_others_decode_while_a_copy_is_on_its_way() -> None:
    async def main(engine: SimEngine) -> tuple[int, float]:
        await engine.generate(turn_of(0, 0, 101))
        engine.offload(key(0))
        other = asyncio.ensure_future(engine.generate(turn_of(1, 0, 10, 100)))
        await asyncio.sleep(0.05)
        before = engine.stats.generated_tokens
        seconds, _ = await seconds_of(engine.generate(turn_of(0, 1, 111)))
        await other
        return engine.stats.generated_tokens - before, seconds

    slow = replace(COST, kv_reload_token_s=1e-3)
    _, seconds = play(engine_of(300, cost=slow), main)
    # 0.1 s for the copy, up to one iteration of the other until it may join, and its own.
    assert 0.1 + iteration_s(11) < seconds < 0.1 + 2 * iteration_s(11) + 2e-3


def test_what_the_pool_still_has_of_a_prompt_is_not_copied() -> None:
    async def main(engine: SimEngine) -> list[tuple[float, int]]:
        seen = []
        for other in (60, 300):  # the second needs all blocks, those of the prompt too
            await engine.generate(turn_of(0, 0, 101))
            engine.offload(key(0))
            await engine.generate(turn_of(9, 0, other - 1, retain=False))
            seconds, result = await seconds_of(engine.generate(turn_of(0, 1, 111, retain=False)))
            seen.append((seconds, result.cached_tokens))
            engine.release(key(0))
        return seen

    shared: dict[int, Shared] = {0: (("group", 45),)}
    (kept, cached), (gone, cached_again) = play(engine_of(300, shared=shared), main)
    assert cached == cached_again == 100
    assert kept == pytest.approx(60 * RELOAD_S + iteration_s(11))
    assert gone == pytest.approx(100 * RELOAD_S + iteration_s(11))


def test_a_member_waits_for_the_prompt_that_another_one_brings_back() -> None:
    async def main(engine: SimEngine) -> list[tuple[float, TurnResult]]:
        await engine.generate(turn_of(0, 0, 101))
        engine.offload(key(0))
        await engine.generate(turn_of(9, 0, 299, retain=False))
        asked = (turn_of(0, 1, 111), turn_of(1, 0, 51))
        return list(await asyncio.gather(*(seconds_of(engine.generate(turn)) for turn in asked)))

    shared: dict[int, Shared] = dict.fromkeys((0, 1), (("group", 45),))
    (first, _), (second, result) = play(engine_of(300, shared=shared), main)
    assert result.cached_tokens == 40
    together = 100 * RELOAD_S + iteration_s(11 + 11) + 1e-3  # both prefill 11 and sample one
    assert [first, second] == pytest.approx([together, together])


def test_a_full_host_takes_no_more_and_new_weights_and_release_forget_what_was_offloaded() -> None:
    async def main(engine: SimEngine) -> list[int]:
        seen = []
        for task in range(3):  # the host holds 200 positions: the last stays in the pool
            await engine.generate(turn_of(task, 0, 101))
            engine.offload(key(task))
        seen += [engine.stats.offloaded_tokens, engine.stats.held_tokens]
        engine.release(key(1))
        seen.append(engine.stats.offloaded_tokens)
        await engine.load_weights(WeightHandle(1, "v1", 1000))
        seen.append(engine.stats.offloaded_tokens)
        seen += [(await engine.generate(turn_of(task, 1, 111))).cached_tokens for task in range(3)]
        return seen

    assert play(engine_of(500, host=200), main) == [200, 100, 100, 0, 0, 0, 0]


def test_offload_of_what_runs_or_finds_no_room_changes_nothing() -> None:
    async def main(engine: SimEngine) -> tuple[int, int]:
        running = asyncio.ensure_future(engine.generate(turn_of(0, 0, 101, 5)))
        await asyncio.sleep(0.001)
        engine.offload(key(0))
        await running
        engine.offload(key(0))  # 100 positions do not fit 50
        engine.offload(key(7))
        return engine.stats.offloaded_tokens, engine.stats.held_tokens

    assert play(engine_of(300, host=50), main) == (0, 100)


def test_abort_while_a_copy_is_on_its_way_lets_the_next_start() -> None:
    async def main(engine: SimEngine) -> float:
        await engine.generate(turn_of(0, 0, 201))
        engine.offload(key(0))
        coming = asyncio.ensure_future(engine.generate(turn_of(0, 1, 211)))
        await asyncio.sleep(0.1)
        waiting = asyncio.ensure_future(seconds_of(engine.generate(turn_of(1, 0, 151))))
        await asyncio.sleep(0.1)
        await engine.abort(key(0), 1)
        assert (await coming).finish_reason == "aborted"
        return (await waiting)[0]

    slow = replace(COST, kv_reload_token_s=1.0)
    assert play(engine_of(300, cost=slow), main) == pytest.approx(0.1 + iteration_s(151))


def test_the_link_is_priced_for_accelerators_and_there_is_none_on_a_cpu() -> None:
    assert cost_model("this-cpu", MODEL).kv_reload_token_s == 0
    cost = cost_model("H100", replace_model(layers=28, hidden=3584, heads=28, kv_heads=4))
    # 28 layers x 2 x 4 heads x 128 dimensions x 2 bytes, at 0.39 of 64 GB/s.
    assert cost.kv_reload_token_s == pytest.approx(57_344 / (0.39 * 64e9))
    no_host = engine_of(300, cost=replace(COST, kv_reload_token_s=0.0))
    assert not no_host.capabilities.offload


def replace_model(**changes: int) -> ModelSettings:
    return msgspec.structs.replace(MODEL, dtype="bfloat16", **changes)


# ------------------------------------------------------------------------------ any order of events


def assert_books(engine: SimEngine) -> None:
    """The pool's sums against a recount of everything that is in it."""
    pool, stats = engine._batch.pool, engine.stats
    held = dict(pool._held.items())
    resting = sum(prefix.cached for prefix in pool._prefixes.values() if not prefix.users)
    assert pool.cached == resting + sum(
        entry.cached for entry in (*held.values(), *pool._queue.values()) if not isinstance(entry, Prefix)
    )
    assert pool.used + pool.cached <= pool.blocks
    for prefix in pool._prefixes.values():
        assert prefix.holders == sum(prefix in run.prefixes for run in held.values())
        assert (prefix.name in pool._queue) == bool(not prefix.users and not prefix.holders and prefix.cached)
    assert 0 <= stats.held_tokens <= stats.resident_tokens <= stats.budget_tokens
    assert 0 <= stats.offloaded_tokens <= engine._batch.host.budget_tokens


NUMBERS = st.integers(0, 7)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.001, 0.013, 0.1, 0.5]),
        st.one_of(
            st.tuples(st.just("turn"), NUMBERS, st.integers(1, 60), st.integers(1, 40), st.booleans()),
            st.tuples(st.sampled_from(["abort", "release", "retain", "offload"]), NUMBERS),
            st.tuples(st.sampled_from(["load", "pause", "lose"])),
        ),
    ),
    max_size=60,
)


@pytest.mark.parametrize("kv_policy", ["lru", "ctb"])
@settings(deadline=None, derandomize=True, max_examples=150)
@given(events=EVENTS)
def test_the_pool_keeps_its_books_whatever_happens(kv_policy: str, events: list[tuple[float, tuple]]) -> None:
    """I4 at every step, every turn answered, and nothing left when all tasks are released."""

    async def main() -> None:
        shared: dict[int, Shared] = {n: (("system", 15), (f"group {n // 3}", 45)) for n in range(6)}
        engine = engine_of(
            150, kv_policy=kv_policy, shared=shared, host=120, cost=replace(COST, kv_reload_token_s=1e-3)
        )
        turns: dict[int, asyncio.Future[TurnResult]] = {}
        everything: list[asyncio.Future[TurnResult]] = []
        contexts: dict[int, int] = {}
        asked = dict.fromkeys(range(8), 0)
        version = 0
        await engine.load_weights(WeightHandle(0, "v0", 1000))
        for wait_s, (what, *arguments) in events:
            await asyncio.sleep(wait_s)
            assert_books(engine)
            if what == "turn":
                number, new, says, retain = arguments
                if number in turns and not turns[number].done():
                    continue
                context = contexts.get(number, 45) + new
                context = context if context + says <= 140 else 46
                contexts[number] = context
                asked[number] += 1
                turn = turn_of(number, asked[number], context, says, priority=float(new % 3), retain=retain)
                turns[number] = asyncio.ensure_future(engine.generate(turn))
                everything.append(turns[number])
            elif what == "abort":
                await engine.abort(key(arguments[0]), asked[arguments[0]])
            elif what == "load":
                version += 1
                await engine.load_weights(WeightHandle(version, f"v{version}", 1000))
            elif what == "pause":
                await engine.pause("keep" if version % 2 else "abort")
                await engine.resume()
            elif what == "lose":
                engine.lose("gone")
                await engine.load_weights(WeightHandle(version, "again", 1000))
            else:
                getattr(engine, what)(key(arguments[0]))
            await asyncio.sleep(0)  # after new weights the last tokens are context: who has no room for his gives way
            assert_books(engine)
        for outcome in await asyncio.gather(*everything, return_exceptions=True):
            assert isinstance(outcome, TurnResult | RankLost)
        for number in range(8):
            engine.release(key(number))
            assert_books(engine)
        stats = engine.stats
        assert stats.resident_tokens == stats.offloaded_tokens == stats.running == stats.waiting == 0

    run_virtual(main)


class Forgetful(BlockPool):
    """A mutant for I4: what a task held is given out and still counted as there."""

    def _pop(self, task: TaskKey) -> object:
        self._queue.pop(task, None)
        return self._held.pop(task)


def test_the_recount_notices_blocks_that_are_counted_twice() -> None:
    async def main(engine: SimEngine) -> None:
        await engine.generate(turn_of(0, 0, 51))
        engine._batch.pool = Forgetful(30, 10, by_task=True)
        await engine.generate(turn_of(1, 0, 51))
        await engine.generate(turn_of(1, 1, 61))
        with pytest.raises(AssertionError):
            assert_books(engine)

    play(engine_of(300), main)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["put", "touch", "pop"]), NUMBERS, st.integers(0, 3)), max_size=60))
def test_the_first_to_go_is_the_lowest_and_then_the_oldest(steps: list[tuple[str, int, int]]) -> None:
    held: HeldTasks[str] = HeldTasks()
    expected: dict[int, tuple[int, int]] = {}
    for moment, (what, number, priority) in enumerate(steps):
        if what == "pop":
            assert (held.pop(key(number)) is not None) == (expected.pop(number, None) is not None)
        elif what == "put" and number not in expected:
            held.put(key(number), "kv", float(priority))
            expected[number] = (priority, moment)
        else:
            held.touch(key(number), float(priority))
            if number in expected:
                expected[number] = (priority, moment)
        first = min(expected, key=lambda number: expected[number], default=None)
        assert held.first_to_go() == (None if first is None else key(first))


def test_marks_of_use_do_not_pile_up() -> None:
    held: HeldTasks[str] = HeldTasks()
    for number in range(3):
        held.put(key(number), "kv", 0.0)
    for _ in range(1000):
        held.touch(key(1), 1.0)
    assert len(held._marks) <= 2 * 3 + STALE_MARKS
    assert held.first_to_go() == key(0)
