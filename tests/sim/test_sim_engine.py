"""The change-driven engine against a per-iteration oracle, and its promises one by one."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
from support.engine_oracle import Got, Played, Script, TaskScript, TurnScript, play

from tiderl.cost.model import CostModel
from tiderl.data.errors import InvariantViolation, RankLost, RequestTooLarge
from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.settings import EngineSettings, ModelSettings
from tiderl.data.turns import Sampling, Turn, TurnResult
from tiderl.sim.engine import SimEngine
from tiderl.sim.growth import Growth
from tiderl.sim.kv import BlockPool, Shared
from tiderl.sim.loop import run_virtual
from tiderl.sim.ranks import SimRank

MODEL = ModelSettings(path="scratch", vocab_size=64, max_context_tokens=4096, pad_id=0, stop_ids=(1,))
COST = CostModel(
    iteration_s=1e-2,
    sequence_s=1e-3,
    context_token_s=1e-5,
    prefill_token_s=1e-4,
    max_batch=1000,
    kv_capacity_tokens=1_000_000,
    reference_token_s=1e-4,
    forward_token_s=1e-4,
    backward_token_s=2e-4,
    optimizer_s=0.5,
    publish_s=0.1,
    load_s=0.07,
    swap_one_way_s=0.0,
    checkpoint_s=0.2,
    weight_bytes=1000,
)


def key(task: int) -> TaskKey:
    return TaskKey("train", task, 0)


def turn_of(task: int, turn: int, context: int, max_new: int, *, priority: float = 0.0, retain: bool = True) -> Turn:
    ids = np.broadcast_to(np.int32(0), (context,))
    return Turn(key(task), turn, ids, Sampling(1.0, max_new, ()), 10_000, priority=priority, retain=retain)


@dataclass(frozen=True)
class Talk:
    """What tasks say, by (task, turn), and what their contexts have in common."""

    says: dict[tuple[int, int], int]
    shared: dict[int, Shared] = field(default_factory=dict)

    def action_tokens(self, key: TaskKey, turn: int) -> int:
        return self.says[key.prompt_id, turn]

    def shared_prompt(self, key: TaskKey) -> Shared:
        return self.shared.get(key.prompt_id, ())


def engine_of(
    says: dict[tuple[int, int], int],
    *,
    budget: int = 10_000,
    max_batch: int = 64,
    chunk: int = 2048,
    beside: int = 2048,
    block: int = 16,
    shared: dict[int, Shared] | None = None,
    kv_policy: str = "lru",
) -> SimEngine:
    settings = EngineSettings(
        MODEL,
        budget,
        max_batch=max_batch,
        prefill_tokens_per_step=chunk,
        prefill_tokens_beside_decoding=beside,
        kv_block_tokens=block,
        kv_policy=kv_policy,
    )
    return SimEngine(0, [SimRank(0)], COST, settings, Talk(says, shared or {}), {})


def handle(version: int) -> WeightHandle:
    return WeightHandle(version, f"version-{version}", 1000)


def got_of(result: TurnResult, now_s: float) -> Got:
    return Got(
        now_s,
        tuple(result.versions.tolist()),
        result.finish_reason,
        result.cached_tokens,
        result.queued_s,
        result.prefill_s,
        result.decode_s,
    )


@dataclass
class Simulated:
    got: dict[tuple[int, int], Got] = field(default_factory=dict)
    preemptions: int = 0
    evicted_tokens: int = 0
    resident: list[tuple[float, int, int]] = field(default_factory=list)  # at a moment: tokens, and unused ones


def simulate(script: Script) -> Simulated:
    """The script on a `SimEngine`, its KV watched."""
    out = Simulated()

    async def main() -> None:
        says = {(i, j): turn.says for i, task in enumerate(script.tasks) for j, turn in enumerate(task.turns)}
        engine = engine_of(
            says,
            budget=script.kv_budget,
            max_batch=script.max_batch,
            chunk=script.prefill_per_step,
            beside=script.prefill_beside,
            block=script.block,
            kv_policy=script.kv_policy,
            shared={
                i: (("system", script.system), (task.group, task.prompt))
                for i, task in enumerate(script.tasks)
                if task.group >= 0
            },
        )
        loop = asyncio.get_running_loop()

        async def until(moment: float) -> None:
            arrived = loop.create_future()
            loop.call_at(moment, arrived.set_result, None)
            await arrived

        async def task(number: int) -> None:
            spec = script.tasks[number]
            await until(spec.start_s)
            context = 0
            for index, turn in enumerate(spec.turns):
                context += turn.new_context
                asked = turn_of(number, index, context, turn.max_new, priority=spec.priority, retain=spec.retain)
                result = await engine.generate(asked)
                out.got[number, index] = got_of(result, loop.time())
                context += len(result.ids)
                if index + 1 < len(spec.turns):
                    if turn.wait_s:
                        await until(loop.time() + turn.wait_s)
                elif spec.release_s is not None:
                    await until(loop.time() + spec.release_s)
                    engine.release(key(number))

        async def load(moment: float, version: int) -> None:
            await until(moment)
            await engine.load_weights(handle(version))

        async def abort(moment: float, number: int, turn: int) -> None:
            await until(moment)
            await engine.abort(key(number), turn)

        async def watch() -> None:
            while True:
                stats = engine.stats
                assert 0 <= stats.held_tokens <= stats.resident_tokens <= stats.budget_tokens
                out.resident.append((loop.time(), stats.resident_tokens, stats.held_tokens))
                await asyncio.sleep(0.013)

        watcher = asyncio.ensure_future(watch())
        async with asyncio.TaskGroup() as group:
            for number in range(len(script.tasks)):
                group.create_task(task(number))
            for moment, version in script.loads:
                group.create_task(load(moment, version))
            for moment, number, turn in script.aborts:
                group.create_task(abort(moment, number, turn))
        watcher.cancel()
        out.preemptions, out.evicted_tokens = engine.stats.preemptions, engine.stats.evicted_tokens

    run_virtual(main)
    return out


def random_script(seed: int) -> Script:
    """Small pools and long turns, so that all of admission, sharing, eviction and preemption happens."""
    rng = np.random.default_rng(seed)
    block = int(rng.choice([1, 4, 16]))
    system = int(rng.choice([0, 0, rng.integers(1, 50)]))
    prompts = [system + int(rng.integers(1, 70)) for _ in range(3)]
    tasks = []
    for _ in range(rng.integers(1, 13)):
        group = int(rng.integers(-1, 3))
        prompt = prompts[group] if group >= 0 else 0
        turns = tuple(
            TurnScript(
                new_context=int(rng.integers(1, 60)) + (prompt if index == 0 else 0),
                says=int(rng.integers(1, 60)),
                max_new=int(rng.integers(1, 60)),
                wait_s=float(rng.choice([0.0, rng.exponential(0.2)])),
            )
            for index in range(rng.integers(1, 5))
        )
        tasks.append(
            TaskScript(
                start_s=float(rng.choice([0.01, rng.exponential(0.3)])),
                priority=float(rng.integers(0, 3)),
                retain=bool(rng.random() < 0.8),
                turns=turns,
                group=group,
                prompt=prompt,
                release_s=float(rng.exponential(0.2)) if rng.random() < 0.7 else None,
            )
        )
    largest = max(sum(t.new_context + t.max_new for t in task.turns) for task in tasks)
    loads = [(0.0, 0)] + [(float(rng.uniform(0.1, 3.0)), v) for v in range(1, rng.integers(1, 4))]
    aborts = tuple(
        (float(rng.uniform(0.0, 2.0)), int(rng.integers(0, len(tasks))), int(rng.integers(0, 3)))
        for _ in range(rng.integers(0, 4))
    )
    ordered = tuple((moment, version) for version, (moment, _) in enumerate(sorted(loads)))
    return Script(
        tasks=tuple(tasks),
        loads=ordered,
        aborts=aborts,
        kv_budget=int(largest * rng.choice([rng.uniform(1.0, 1.5), rng.uniform(1.0, 3.0)])),
        max_batch=int(rng.integers(1, 13)),
        prefill_per_step=int(rng.choice([7, 32, 2048])),
        prefill_beside=int(rng.choice([5, 2048])),
        block=block,
        system=system,
    )


def assert_equal_to_oracle(script: Script, label: object) -> Played:
    expected, actual = play(script, COST), simulate(script)
    assert expected.peak_blocks <= max(script.kv_budget // script.block, -(-script.kv_budget // script.block))
    assert actual.got.keys() == expected.got.keys(), label
    assert actual.preemptions == expected.preemptions, label
    for name, want in expected.got.items():
        have = actual.got[name]
        assert (have.versions, have.reason, have.cached) == (want.versions, want.reason, want.cached), (label, name)
        for what in ("finished_s", "queued_s", "prefill_s", "decode_s"):
            assert getattr(have, what) == pytest.approx(getattr(want, what), rel=1e-9, abs=1e-9), (label, name, what)
    if script.kv_policy == "ctb":
        assert actual.evicted_tokens == expected.evicted_blocks * script.block, label
    if not script.aborts and all(task.release_s is None for task in script.tasks):
        assert_resident_is_exact(expected, actual, label)
    return expected


def assert_resident_is_exact(expected: Played, actual: Simulated, label: object) -> None:
    """At every moment that was looked at: between two changes, what was there after the last one."""
    moments = [moment for moment, *_ in expected.resident]
    for moment, *tokens in actual.resident:
        at = bisect_right(moments, moment) - 1
        if at >= 0 and all(abs(moment - other) > 1e-9 for other in moments[at : at + 2]):
            assert tokens == list(expected.resident[at][1:]), (label, moment)


@pytest.mark.parametrize("kv_policy", ["lru", "ctb"])
@pytest.mark.parametrize("start", range(0, 400, 50))
def test_closed_form_equals_the_per_iteration_oracle(start: int, kv_policy: str) -> None:
    scripts = {seed: replace(random_script(seed), kv_policy=kv_policy) for seed in range(start, start + 50)}
    for seed in range(start, start + 50, 10):  # nothing from outside: resident tokens are compared at many moments
        calm = replace(scripts[seed], aborts=(), tasks=tuple(replace(t, release_s=None) for t in scripts[seed].tasks))
        assert_equal_to_oracle(calm, seed)
    played = [assert_equal_to_oracle(script, seed) for seed, script in scripts.items()]
    assert sum(p.preemptions for p in played) > 10, "preemption was not exercised"
    assert sum(got.cached > 0 for p in played for got in p.got.values()) > 20, "nothing was found cached"
    assert kv_policy == "lru" or sum(p.evicted_blocks for p in played) > 100, "no held task made room"


def test_one_turn_takes_what_the_formula_says() -> None:
    async def main() -> tuple[TurnResult, float]:
        engine = engine_of({(0, 0): 3})
        await engine.load_weights(handle(0))
        loaded = asyncio.get_running_loop().time()
        result = await engine.generate(turn_of(0, 0, context=10, max_new=8))
        return result, asyncio.get_running_loop().time() - loaded

    result, seconds = run_virtual(main)
    # Prefill of 10 tokens with the first token, then two decodes over contexts of 11 and 12.
    prefill = 1e-2 + 1e-3 + 10 * 1e-4
    decode = 2 * (1e-2 + 1e-3) + (11 + 12) * 1e-5
    assert seconds == pytest.approx(prefill + decode)
    assert result.prefill_s == pytest.approx(prefill) and result.decode_s == pytest.approx(decode)
    assert result.finish_reason == "stop" and len(result.ids) == 3 and result.ids.strides == (0,)


def test_second_turn_prefills_only_what_is_in_no_whole_block() -> None:
    async def main(block: int) -> TurnResult:
        engine = engine_of({(0, 0): 3, (0, 1): 1}, block=block)
        await engine.load_weights(handle(0))
        await engine.generate(turn_of(0, 0, context=40, max_new=8))
        return await engine.generate(turn_of(0, 1, context=40 + 3 + 5, max_new=8))

    # The last token of the first turn was sampled but never computed: 42 of 48 positions are there, 32 in whole blocks.
    assert run_virtual(lambda: main(1)).cached_tokens == 42
    assert run_virtual(lambda: main(16)).cached_tokens == 32


def test_members_of_a_group_share_the_blocks_of_their_prompt() -> None:
    async def main() -> tuple[list[int], int, int]:
        prompt = (("group", 100),)
        engine = engine_of({(i, 0): 5 for i in range(4)}, shared=dict.fromkeys(range(4), prompt))
        await engine.load_weights(handle(0))
        results = await asyncio.gather(*(engine.generate(turn_of(i, 0, 100, 8)) for i in range(4)))
        return [r.cached_tokens for r in results], engine.stats.prefilled_tokens, engine.stats.resident_tokens

    cached, prefilled, resident = run_virtual(main)
    # (100 - 1) // 16 = 6 blocks are common; the last 4 positions and the sampled ones are each task's own.
    assert cached == [0, 96, 96, 96]
    assert prefilled == 100 + 3 * 4
    assert resident == 96, "after their turns the common blocks are cached once, the begun blocks of each task are not"


def test_the_next_member_computes_what_an_aborted_one_left() -> None:
    async def main() -> tuple[TurnResult, float]:
        prompt = (("group", 500),)
        engine = engine_of({(i, 0): 2 for i in range(2)}, chunk=100, shared=dict.fromkeys(range(2), prompt))
        await engine.load_weights(handle(0))
        first, second = (asyncio.ensure_future(engine.generate(turn_of(i, 0, 500, 8))) for i in range(2))
        await asyncio.sleep(0.025)  # one chunk of 100 is done, the second runs until 0.04
        await engine.abort(key(0), 0)
        await first
        left = asyncio.get_running_loop().time()
        return await second, asyncio.get_running_loop().time() - left

    result, seconds = run_virtual(main)
    # Of 200 computed positions 12 whole blocks stay; 308 of 500 are left in chunks of 100, the last with the token.
    chunks = 4 * 1e-2 + 308 * 1e-4 + 1e-3
    assert seconds == pytest.approx(chunks + 1e-2 + 1e-3 + 501 * 1e-5)
    assert result.cached_tokens == 496, "what it counted on when it was admitted"


def test_a_prompt_is_forgotten_with_the_last_task_of_its_group() -> None:
    async def main() -> list[int]:
        prompt = (("group", 100),)
        engine = engine_of({(i, 0): 5 for i in range(3)}, shared=dict.fromkeys(range(3), prompt))
        await engine.load_weights(handle(0))
        for task in range(2):
            await engine.generate(turn_of(task, 0, 100, 8))
        resident = []
        for task in range(2):
            engine.release(key(task))
            resident.append(engine.stats.resident_tokens)
        return [*resident, (await engine.generate(turn_of(2, 0, 100, 8))).cached_tokens]

    assert run_virtual(main) == [96, 0, 0]


def test_who_came_last_gives_way_keeps_its_tokens_and_goes_on() -> None:
    async def main() -> tuple[list[TurnResult], int, int]:
        says = {(0, 0): 64, (1, 0): 64}
        engine = engine_of(says, budget=160)
        await engine.load_weights(handle(3))
        results = await asyncio.gather(*(engine.generate(turn_of(task, 0, 64, 64)) for task in range(2)))
        return results, engine.stats.preemptions, engine.stats.prefilled_tokens

    (first, second), preemptions, prefilled = run_virtual(main)
    # 10 blocks; each holds 4, then 5. Both are at 80 positions after the 17th token; the next does not fit twice.
    assert preemptions == 1
    assert len(first.ids) == len(second.ids) == 64
    assert set(second.versions.tolist()) == {3}
    # The second recomputes at most its 81 known tokens; what was not needed meanwhile it finds again.
    assert 128 < prefilled <= 128 + 81
    assert second.decode_s > first.decode_s and second.queued_s == first.queued_s == 0.0


def test_the_lower_priority_gives_way_whoever_came_first() -> None:
    async def main() -> list[int]:
        engine = engine_of({(0, 0): 64, (1, 0): 64}, budget=160)
        await engine.load_weights(handle(0))
        order: list[int] = []

        async def one(task: int, priority: float) -> None:
            await engine.generate(turn_of(task, 0, 64, 64, priority=priority))
            order.append(task)

        async with asyncio.TaskGroup() as group:
            group.create_task(one(0, 0.0))
            await asyncio.sleep(0.005)  # the first is in the batch already
            group.create_task(one(1, 1.0))
        return order

    assert run_virtual(main) == [1, 0]


def test_a_preempted_turn_has_the_version_of_each_of_its_tokens() -> None:
    async def main() -> TurnResult:
        engine = engine_of({(0, 0): 64, (1, 0): 64}, budget=160)
        await engine.load_weights(handle(3))
        first, second = (asyncio.ensure_future(engine.generate(turn_of(task, 0, 64, 64))) for task in range(2))
        while not engine.stats.preemptions:
            await asyncio.sleep(0.001)
        await engine.load_weights(handle(4))
        await first
        return await second

    versions = run_virtual(main).versions.tolist()
    # Preempted before its 18th token: 17 were sampled by the old version.
    assert versions == [3] * 17 + [4] * 47


def test_interrupted_turn_says_the_rest_when_it_goes_on() -> None:
    async def main() -> tuple[int, int, str]:
        engine = engine_of({(0, 0): 20})
        await engine.load_weights(handle(0))
        running = asyncio.ensure_future(engine.generate(turn_of(0, 0, context=10, max_new=50)))
        await asyncio.sleep(0.1)
        await engine.abort(key(0), 0)
        first = await running
        second = await engine.generate(turn_of(0, 0, context=10 + len(first.ids), max_new=50 - len(first.ids)))
        return len(first.ids), len(second.ids), second.finish_reason

    first, second, reason = run_virtual(main)
    assert 0 < first < 20 and first + second == 20 and reason == "stop"


def test_tokens_before_and_after_a_load_carry_their_versions() -> None:
    async def main() -> TurnResult:
        engine = engine_of({(0, 0): 20})
        await engine.load_weights(handle(3))
        running = asyncio.ensure_future(engine.generate(turn_of(0, 0, context=10, max_new=50)))
        await asyncio.sleep(0.1)
        await engine.load_weights(handle(4))
        return await running

    versions = run_virtual(main).versions.tolist()
    assert len(versions) == 20 and versions == sorted(versions) and set(versions) == {3, 4}


def test_higher_priority_is_admitted_first() -> None:
    async def main() -> list[int]:
        engine = engine_of({(i, 0): 5 for i in range(4)}, max_batch=1)
        await engine.load_weights(handle(0))
        order: list[int] = []

        async def one(task: int, priority: float) -> None:
            await engine.generate(turn_of(task, 0, 10, 8, priority=priority))
            order.append(task)

        async with asyncio.TaskGroup() as group:
            for task, priority in enumerate([0.0, 1.0, 3.0, 1.0]):
                group.create_task(one(task, priority))
        return order

    assert run_virtual(main) == [2, 1, 3, 0]


def test_the_least_recently_used_context_is_lost_from_its_end() -> None:
    async def main(third: int, asked: int) -> int:
        says = {(i, j): 1 for i in range(3) for j in range(2)}
        engine = engine_of(says, budget=256)
        await engine.load_weights(handle(0))
        for task, context in enumerate((100, 100, third)):  # 6 whole blocks of the first two stay, of 16
            await engine.generate(turn_of(task, 0, context, 1))
        return (await engine.generate(turn_of(asked, 1, 102, 1))).cached_tokens

    def cached(third: int) -> list[int]:
        return [run_virtual(partial(main, third, asked)) for asked in (0, 1)]

    assert cached(third=64) == [96, 96]
    assert cached(third=90) == [64, 96], "2 of its 6 blocks were in the way of the first"
    assert cached(third=200) == [0, 48], "13 of 16 blocks were needed"


class BlindGrowth(Growth):
    """A mutant: nobody sees the next block coming, so nobody is preempted for it."""

    def next(self, iterations: int) -> int:
        return 0


class LastingPool(BlockPool):
    """A mutant: KV outlives its version."""

    def forget_cached(self) -> None:
        """Nothing."""


@pytest.mark.parametrize("blind", [False, True])
def test_kv_stays_in_its_budget_only_because_growth_is_foreseen(blind: bool) -> None:
    async def main() -> None:
        engine = engine_of({(0, 0): 64, (1, 0): 64}, budget=160)
        if blind:
            engine._batch._growth = BlindGrowth(16)
        await engine.load_weights(handle(0))
        running = [asyncio.ensure_future(engine.generate(turn_of(task, 0, 64, 64))) for task in range(2)]
        while not all(turn.done() for turn in running):
            if engine.stats.resident_tokens > engine.stats.budget_tokens:
                raise InvariantViolation("more is resident than the budget (I4)")
            await asyncio.sleep(0.01)

    if blind:
        with pytest.raises(InvariantViolation, match="I4"):
            run_virtual(main)
    else:
        run_virtual(main)


@pytest.mark.parametrize("forgets", [True, False])
def test_no_kv_of_an_old_version_is_found_only_because_it_is_forgotten(forgets: bool) -> None:
    async def main() -> int:
        engine = engine_of({(0, 0): 3, (0, 1): 3})
        if not forgets:
            engine._batch.pool = LastingPool(engine._batch.pool.blocks, 16)
        await engine.load_weights(handle(0))
        await engine.generate(turn_of(0, 0, 40, 8))
        await engine.load_weights(handle(1))
        return (await engine.generate(turn_of(0, 1, 48, 8))).cached_tokens

    assert (run_virtual(main) == 0) is forgets


def test_more_blocks_than_there_are_cannot_be_taken() -> None:
    pool = BlockPool(4, 16)
    pool.take(key(0), (), 40)
    with pytest.raises(InvariantViolation, match="I4"):
        pool.take(key(1), (), 20)


def test_too_large_a_turn_is_refused() -> None:
    async def main() -> None:
        engine = engine_of({(0, 0): 1}, budget=100)
        await engine.load_weights(handle(0))
        await engine.generate(turn_of(0, 0, 92, 8))
        with pytest.raises(RequestTooLarge):
            await engine.generate(turn_of(1, 0, 93, 8))

    run_virtual(main)


def test_released_task_leaves_no_kv_even_when_cancelled_in_mid_iteration() -> None:
    async def main() -> int:
        engine = engine_of({(0, 0): 50})
        await engine.load_weights(handle(0))
        running = asyncio.ensure_future(engine.generate(turn_of(0, 0, 30, 60)))
        await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        engine.release(key(0))
        await asyncio.sleep(1.0)
        return engine.stats.resident_tokens

    assert run_virtual(main) == 0


def test_other_work_on_the_rank_waits_for_the_iteration_and_stops_the_engine() -> None:
    async def main() -> tuple[float, float]:
        rank = SimRank(0)
        engine = SimEngine(0, [rank], COST, EngineSettings(MODEL, 1000), Talk({(0, 0): 2}), {})
        loop = asyncio.get_running_loop()
        await engine.load_weights(handle(0))
        start = loop.time()
        running = asyncio.ensure_future(engine.generate(turn_of(0, 0, 10, 8)))
        await asyncio.sleep(0.001)
        await rank.work(1.0)
        worked = loop.time() - start
        await running
        return worked, loop.time() - start

    worked, finished = run_virtual(main)
    first = 1e-2 + 1e-3 + 10 * 1e-4
    assert worked == pytest.approx(first + 1.0)
    assert finished == pytest.approx(first + 1.0 + 1e-2 + 1e-3 + 11 * 1e-5)


def test_lost_rank_fails_its_turns_and_forgets_everything() -> None:
    async def main() -> None:
        rank = SimRank(0)
        engine = SimEngine(0, [rank], COST, EngineSettings(MODEL, 1000), Talk({(0, 0): 5}), {})
        await engine.load_weights(handle(0))
        running = asyncio.ensure_future(engine.generate(turn_of(0, 0, 10, 8)))
        work = asyncio.ensure_future(rank.work(10.0))
        await asyncio.sleep(0.1)
        rank.lose()
        engine.lose("killed")
        for outcome in await asyncio.gather(running, work, return_exceptions=True):
            assert isinstance(outcome, RankLost)
        with pytest.raises(RankLost):
            await engine.generate(turn_of(0, 0, 10, 8))
        assert engine.stats.version == -1 and engine.stats.resident_tokens == 0
        rank.restore()
        await engine.load_weights(handle(1))
        result = await engine.generate(turn_of(0, 0, 10, 8))
        assert set(result.versions.tolist()) == {1} and result.cached_tokens == 0

    run_virtual(main)


def test_stats_count_every_token_once() -> None:
    script = replace(random_script(3), loads=((0.0, 0),), aborts=())
    sampled = sum(len(got.versions) for got in simulate(script).got.values())
    assert sampled == sum(min(turn.says, turn.max_new) for task in script.tasks for turn in task.turns)
