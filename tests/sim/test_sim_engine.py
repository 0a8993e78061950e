"""The change-driven engine against a per-iteration oracle, and its promises one by one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from support.engine_oracle import Got, Script, TaskScript, TurnScript, play

from tiderl.cost.model import CostModel
from tiderl.data.errors import RankLost, RequestTooLarge
from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.settings import EngineSettings, ModelSettings
from tiderl.data.turns import Sampling, Turn, TurnResult
from tiderl.sim.engine import SimEngine
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


def engine_of(
    says: dict[tuple[int, int], int], *, budget: int = 10_000, max_batch: int = 64, chunk: int = 2048
) -> SimEngine:
    settings = EngineSettings(MODEL, budget, max_batch=max_batch, prefill_tokens_per_step=chunk)
    return SimEngine(0, [SimRank(0)], COST, settings, lambda task, turn: says[task.prompt_id, turn], {})


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


def simulate(script: Script) -> dict[tuple[int, int], Got]:
    got: dict[tuple[int, int], Got] = {}

    async def main() -> None:
        says = {(i, j): turn.says for i, task in enumerate(script.tasks) for j, turn in enumerate(task.turns)}
        engine = engine_of(says, budget=script.kv_budget, max_batch=script.max_batch, chunk=script.prefill_per_step)
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
                got[number, index] = got_of(result, loop.time())
                context += len(result.ids)
                if turn.wait_s:
                    await until(loop.time() + turn.wait_s)

        async def load(moment: float, version: int) -> None:
            await until(moment)
            await engine.load_weights(handle(version))

        async def abort(moment: float, number: int, turn: int) -> None:
            await until(moment)
            await engine.abort(key(number), turn)

        async def watch() -> None:
            while True:
                assert engine.stats.resident_tokens <= script.kv_budget
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

    run_virtual(main)
    return got


def random_script(seed: int) -> Script:
    rng = np.random.default_rng(seed)
    tasks = []
    for _ in range(rng.integers(1, 9)):
        turns = tuple(
            TurnScript(
                new_context=int(rng.integers(1, 60)),
                says=int(rng.integers(1, 25)),
                max_new=int(rng.integers(1, 25)),
                wait_s=float(rng.choice([0.0, rng.exponential(0.2)])),
            )
            for _ in range(rng.integers(1, 5))
        )
        priority = float(rng.integers(0, 3))
        tasks.append(TaskScript(float(rng.exponential(0.3)), priority, bool(rng.random() < 0.8), turns))
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
        kv_budget=int(largest * rng.uniform(1.0, 3.0)),
        max_batch=int(rng.integers(1, 6)),
        prefill_per_step=int(rng.choice([7, 32, 2048])),
    )


@pytest.mark.parametrize("start", range(0, 400, 50))
def test_closed_form_equals_the_per_iteration_oracle(start: int) -> None:
    for seed in range(start, start + 50):
        script = random_script(seed)
        expected, peak = play(script, COST)
        assert peak <= script.kv_budget
        actual = simulate(script)
        assert actual.keys() == expected.keys(), seed
        for name, want in expected.items():
            have = actual[name]
            assert (have.versions, have.reason, have.cached) == (want.versions, want.reason, want.cached), (
                seed,
                name,
            )
            for field in ("finished_s", "queued_s", "prefill_s", "decode_s"):
                assert getattr(have, field) == pytest.approx(getattr(want, field), abs=1e-9), (
                    seed,
                    name,
                    field,
                )


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


def test_second_turn_prefills_only_what_has_no_kv() -> None:
    async def main() -> TurnResult:
        engine = engine_of({(0, 0): 3, (0, 1): 1})
        await engine.load_weights(handle(0))
        await engine.generate(turn_of(0, 0, context=10, max_new=8))
        return await engine.generate(turn_of(0, 1, context=10 + 3 + 5, max_new=8))

    # The last token of the first turn was sampled but never computed: 12 of 18 positions are there.
    assert run_virtual(main).cached_tokens == 12


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


def test_least_recently_used_waiting_task_is_evicted_whole() -> None:
    async def main() -> list[int]:
        says = {(i, j): 1 for i in range(3) for j in range(2)}
        engine = engine_of(says, budget=250)
        await engine.load_weights(handle(0))
        for task in range(3):  # each holds 100 positions afterwards; the third takes the room of the first
            await engine.generate(turn_of(task, 0, 100, 1))
        return [(await engine.generate(turn_of(task, 1, 102, 1))).cached_tokens for task in (1, 2, 0)]

    # Serving 1 and 2 again evicts nobody (0 is gone already); then 0 is computed afresh.
    assert run_virtual(main) == [100, 100, 0]


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
        engine = SimEngine(0, [rank], COST, EngineSettings(MODEL, 1000), lambda task, turn: 2, {})
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
        engine = SimEngine(0, [rank], COST, EngineSettings(MODEL, 1000), lambda task, turn: 5, {})
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
    sampled = sum(len(got.versions) for got in simulate(script).values())
    assert sampled == sum(min(turn.says, turn.max_new) for task in script.tasks for turn in task.turns)
