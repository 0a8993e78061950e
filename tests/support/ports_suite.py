"""What every Cluster promises, whatever is behind it: real processes, inline cores or the virtual clock.

Each function is one promise over a prepared `Subject`. Run them all with

    @pytest.mark.parametrize("promise", PROMISES, ids=name_of)
    def test_cluster(promise): run(check(make, promise))

where `make()` builds a `Subject` around a cluster that is not started and `run` drives a coroutine (`asyncio.run`, or
the virtual loop). Only what the ports promise is asked: no speeds, no token values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import pytest

from tiderl.data.errors import BudgetError, RequestTooLarge
from tiderl.data.records import MicroBatch, Sequence, TaskKey, WeightHandle
from tiderl.data.turns import Sampling, Turn, TurnResult
from tiderl.runtime.ports import Cluster, Engine

NEVER_S = 0.2
"""Long enough for a working engine to answer a small turn, short enough for a test that it must not."""


@dataclass(frozen=True)
class Subject:
    """A cluster under test. Token ids 3 … vocab_size - 1 are ordinary words."""

    cluster: Cluster
    vocab_size: int
    max_context_tokens: int  # at least 64 blocks
    prompt_id: int = 0  # whose tasks the promise uses: another one for each promise over the same cluster
    block_tokens: int = 1  # of its engines' KV: what is reused or not is whole blocks

    @property
    def engine(self) -> Engine:
        return self.cluster.engines[min(self.cluster.engines)]


Promise = Callable[[Subject], Awaitable[None]]


async def check(make: Callable[[], Subject], promise: Promise) -> None:
    """Start the cluster, load version 0 everywhere, ask for the promise, close."""
    subject = make()
    await subject.cluster.start()
    try:
        await subject.cluster.update.warm_up([], 0, 0.0)
        await load_everywhere(subject, await subject.cluster.update.export(0))
        await promise(subject)
    finally:
        await subject.cluster.close()


def name_of(promise: Promise) -> str:
    return promise.__name__


async def load_everywhere(subject: Subject, handle: WeightHandle) -> None:
    for replica in sorted(subject.cluster.engines):
        await subject.cluster.engines[replica].load_weights(handle)


def words(subject: Subject, tokens: int, seed: int = 0) -> np.ndarray:
    """int32 [tokens] of ordinary words."""
    drawn = np.random.default_rng(seed).integers(3, subject.vocab_size, tokens)
    return drawn.astype(np.int32)


def turn_of(subject: Subject, ids: np.ndarray, member: int = 0, turn: int = 0, new: int = 4) -> Turn:
    sampling = Sampling(temperature=1.0, max_new_tokens=new, stop_ids=(), seed=member + 1)
    return Turn(TaskKey("train", subject.prompt_id, member), turn, ids, sampling, remaining_tokens=1000)


def micro_batch(subject: Subject, update: int = 1, index: int = 0, sequences: int = 2) -> MicroBatch:
    """Sequences of 12, 13, … tokens, loss on the last 4 of each, made by version `update - 1`."""
    made = []
    for member in range(sequences):
        tokens = 12 + member
        mask = np.arange(tokens) >= tokens - 4
        made.append(
            Sequence(
                trajectory_id=member,
                prompt_id=0,
                member=member,
                ids=words(subject, tokens, seed=member),
                loss_mask=mask,
                logprobs=np.where(mask, np.float32(-1.5), np.float32(0)),
                versions=np.where(mask, update - 1, -1).astype(np.int32),
                reward=float(member % 2),
                group_rewards=np.array([i % 2 for i in range(sequences)], np.float64),
            )
        )
    return MicroBatch(update, 0, index, tuple(made))


def assert_whole(turn: Turn, result: TurnResult) -> None:
    """A result names its turn; one log-prob and one version per token; never more tokens than asked for."""
    assert (result.task, result.turn) == (turn.task, turn.turn)
    assert len(result.ids) == len(result.logprobs) == len(result.versions) <= turn.sampling.max_new_tokens
    assert np.issubdtype(result.ids.dtype, np.int32) and np.issubdtype(result.logprobs.dtype, np.float32)
    assert np.all(result.logprobs <= 0) and np.all(np.isfinite(result.logprobs))
    assert 0 <= result.cached_tokens <= len(turn.ids)
    assert min(result.queued_s, result.prefill_s, result.decode_s) >= 0


# ------------------------------------------------------------------------------------ engine


async def every_generate_gets_its_result(subject: Subject) -> None:
    turns = [turn_of(subject, words(subject, 5 + i, seed=i), member=i) for i in range(6)]
    for turn, result in zip(turns, await asyncio.gather(*map(subject.engine.generate, turns)), strict=True):
        assert_whole(turn, result)
        assert result.finish_reason in ("length", "stop")
        assert len(result.ids) > 0


async def tokens_carry_the_loaded_version(subject: Subject) -> None:
    first = await subject.engine.generate(turn_of(subject, words(subject, 6)))
    assert set(first.versions.tolist()) == {0}
    await load_everywhere(subject, await subject.cluster.update.export(1))
    assert subject.engine.stats.version == 1
    second = await subject.engine.generate(turn_of(subject, words(subject, 6), turn=1))
    assert set(second.versions.tolist()) == {1}


async def weights_loaded_in_mid_turn_never_go_back(subject: Subject) -> None:
    handle = await subject.cluster.update.export(1)
    turn = turn_of(subject, words(subject, 6), new=24)
    running = asyncio.ensure_future(subject.engine.generate(turn))
    await asyncio.sleep(0)
    await subject.engine.load_weights(handle)
    late = await subject.engine.generate(turn_of(subject, words(subject, 7), member=1))
    result = await running
    assert_whole(turn, result)
    assert set(late.versions.tolist()) == {1}
    assert set(result.versions.tolist()) <= {0, 1}
    assert np.all(np.diff(result.versions) >= 0)


async def second_turn_reuses_its_context(subject: Subject) -> None:
    context = words(subject, 24 * subject.block_tokens)
    first = await subject.engine.generate(turn_of(subject, context))
    longer = np.concatenate([context, first.ids, words(subject, 3, seed=1)])
    second = await subject.engine.generate(turn_of(subject, longer, turn=1))
    assert first.cached_tokens == 0
    assert second.cached_tokens >= len(context) // 2


async def released_context_is_computed_again(subject: Subject) -> None:
    if not subject.engine.capabilities.retain:
        return  # its hints have no effect, and it says so
    context = words(subject, 24 * subject.block_tokens)
    turn = turn_of(subject, context)
    first = await subject.engine.generate(turn)
    subject.engine.release(turn.task)
    longer = np.concatenate([context, first.ids, words(subject, 3, seed=1)])
    assert (await subject.engine.generate(turn_of(subject, longer, turn=1))).cached_tokens == 0


async def offloaded_context_comes_back(subject: Subject) -> None:
    if not subject.engine.capabilities.offload:
        pytest.skip("this engine says that it cannot offload")
    context = words(subject, 24)
    turn = turn_of(subject, context)
    first = await subject.engine.generate(turn)
    subject.engine.offload(turn.task)
    longer = np.concatenate([context, first.ids, words(subject, 3, seed=1)])
    assert (await subject.engine.generate(turn_of(subject, longer, turn=1))).cached_tokens >= len(context) // 2
    assert subject.engine.stats.offloaded_tokens == 0
    subject.engine.offload(turn.task)
    subject.engine.release(turn.task)
    assert (await subject.engine.generate(turn_of(subject, longer, turn=2))).cached_tokens == 0


async def kv_of_an_old_version_is_not_reused(subject: Subject) -> None:
    context = words(subject, 24 * subject.block_tokens)
    first = await subject.engine.generate(turn_of(subject, context))
    await load_everywhere(subject, await subject.cluster.update.export(1))
    longer = np.concatenate([context, first.ids, words(subject, 3, seed=1)])
    assert (await subject.engine.generate(turn_of(subject, longer, turn=1))).cached_tokens == 0


async def aborted_turn_returns_what_it_has(subject: Subject) -> None:
    turn = turn_of(subject, words(subject, 6), new=24)
    running = asyncio.ensure_future(subject.engine.generate(turn))
    await asyncio.sleep(0)
    await subject.engine.abort(turn.task, turn.turn)
    result = await running
    assert_whole(turn, result)
    assert result.finish_reason in ("aborted", "length", "stop")  # it may have been quicker
    await subject.engine.abort(turn.task, turn.turn)  # not pending: nothing happens


async def cancelled_generate_frees_its_task(subject: Subject) -> None:
    turn = turn_of(subject, words(subject, 6), new=24)
    running = asyncio.ensure_future(subject.engine.generate(turn))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert_whole(turn, await subject.engine.generate(turn))


async def second_turn_of_a_running_task_is_refused(subject: Subject) -> None:
    turn = turn_of(subject, words(subject, 6))
    await subject.engine.pause("keep")  # so that the first cannot be done too early
    running = asyncio.ensure_future(subject.engine.generate(turn))
    await asyncio.sleep(0)
    with pytest.raises(BudgetError):
        await subject.engine.generate(turn_of(subject, words(subject, 9), turn=1))
    await subject.engine.resume()
    assert_whole(turn, await running)


async def too_large_a_turn_is_refused_at_once(subject: Subject) -> None:
    with pytest.raises(RequestTooLarge):
        await subject.engine.generate(turn_of(subject, words(subject, subject.max_context_tokens + 1)))
    turn = turn_of(subject, words(subject, 6))
    assert_whole(turn, await subject.engine.generate(turn))


async def paused_engine_keeps_turns_until_resumed(subject: Subject) -> None:
    await subject.engine.pause("keep")
    await subject.engine.pause("keep")  # twice is as once
    turn = turn_of(subject, words(subject, 6))
    running = asyncio.ensure_future(subject.engine.generate(turn))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(NEVER_S):
            await asyncio.shield(running)
    await subject.engine.resume()
    result = await running
    assert_whole(turn, result)
    assert result.finish_reason in ("length", "stop")


async def pause_with_abort_returns_every_turn(subject: Subject) -> None:
    turns = [turn_of(subject, words(subject, 6, seed=i), member=i, new=24) for i in range(3)]
    running = [asyncio.ensure_future(subject.engine.generate(turn)) for turn in turns]
    await asyncio.sleep(0)
    await subject.engine.pause("abort")
    for turn, result in zip(turns, await asyncio.gather(*running), strict=True):
        assert_whole(turn, result)
    await subject.engine.resume()
    turn = turn_of(subject, words(subject, 6))
    assert_whole(turn, await subject.engine.generate(turn))


async def stats_follow_the_work(subject: Subject) -> None:
    result = await subject.engine.generate(turn_of(subject, words(subject, 6)))
    stats = subject.engine.stats
    assert stats.version == 0 and not stats.paused
    assert stats.generated_tokens >= len(result.ids) > 0
    assert 0 <= stats.resident_tokens <= stats.budget_tokens


# ----------------------------------------------------------------------------------- trainer


async def update_cycle_makes_the_next_version(subject: Subject) -> None:
    cluster, update = subject.cluster, subject.cluster.update
    actor = cluster.actors[0]
    mb = micro_batch(subject)
    reference = await cluster.references[0].logprobs(mb) if cluster.references else None
    if reference is not None:
        assert reference.shape == (mb.tokens,) and reference.dtype == np.float32
        assert np.all(np.isfinite(reference))
    await update.begin(1, [actor.rank])
    await actor.forward(mb)
    await actor.backward(mb, reference)
    stats = await update.finish()
    assert stats.seconds >= 0
    assert all(np.isfinite(value) for value in stats.metrics.values())
    handle = await update.export(1)
    assert handle.version == 1
    await load_everywhere(subject, handle)
    result = await subject.engine.generate(turn_of(subject, words(subject, 6)))
    assert set(result.versions.tolist()) == {1}
    await update.discard(handle)


async def two_microbatches_make_one_update(subject: Subject) -> None:
    update, actor = subject.cluster.update, subject.cluster.actors[0]
    batches = [micro_batch(subject, index=i) for i in range(2)]
    references = [
        await subject.cluster.references[0].logprobs(mb) if subject.cluster.references else None for mb in batches
    ]
    await update.begin(1, [actor.rank])
    for mb, reference in zip(batches, references, strict=True):
        await actor.forward(mb)
        await actor.backward(mb, reference)
    assert (await update.finish()).seconds >= 0


async def generation_goes_on_beside_an_update(subject: Subject) -> None:
    update, actor = subject.cluster.update, subject.cluster.actors[0]
    mb = micro_batch(subject)
    turn = turn_of(subject, words(subject, 6), new=24)
    running = asyncio.ensure_future(subject.engine.generate(turn))
    reference = await subject.cluster.references[0].logprobs(mb) if subject.cluster.references else None
    await update.begin(1, [actor.rank])
    await actor.forward(mb)
    await actor.backward(mb, reference)
    await update.finish()
    assert_whole(turn, await running)


# ----------------------------------------------------------------------------------- cluster


async def closing_twice_is_closing_once(subject: Subject) -> None:
    await subject.cluster.close()
    await subject.cluster.close()


PROMISES: tuple[Promise, ...] = (
    every_generate_gets_its_result,
    tokens_carry_the_loaded_version,
    weights_loaded_in_mid_turn_never_go_back,
    second_turn_reuses_its_context,
    released_context_is_computed_again,
    offloaded_context_comes_back,
    kv_of_an_old_version_is_not_reused,
    aborted_turn_returns_what_it_has,
    cancelled_generate_frees_its_task,
    second_turn_of_a_running_task_is_refused,
    too_large_a_turn_is_refused_at_once,
    paused_engine_keeps_turns_until_resumed,
    pause_with_abort_returns_every_turn,
    stats_follow_the_work,
    update_cycle_makes_the_next_version,
    two_microbatches_make_one_update,
    generation_goes_on_beside_an_update,
    closing_twice_is_closing_once,
)
