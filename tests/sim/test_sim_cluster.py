"""The simulated trainer's and environments' seconds, and the cluster's layout, losses and refusals."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tiderl.cost import cost_model
from tiderl.data.errors import (
    CheckpointError,
    ConfigurationError,
    EnvironmentRaised,
    EnvironmentTimeout,
    InvariantViolation,
    RankLost,
)
from tiderl.data.records import Action, MicroBatch, Prompt, Sequence, TaskKey, TokenCount, WeightHandle
from tiderl.data.settings import EngineSettings, ModelSettings, WaitProfile, WorkloadProfile
from tiderl.runtime.ports import RankChange
from tiderl.sim.cluster import SimCluster
from tiderl.sim.environments import SimEnvironments
from tiderl.sim.loop import run_virtual
from tiderl.sim.ranks import SimRank
from tiderl.sim.transfer import SimTransfer, TransferKind
from tiderl.sim.workload import Workload

MODEL = ModelSettings(path="scratch", vocab_size=64, max_context_tokens=128, pad_id=0, stop_ids=(1,))
COST = cost_model("this-cpu", MODEL)
PROFILE = WorkloadProfile(
    turns_median=3.0,
    turns_sigma=0.5,
    first_observation_tokens=15.0,
    observation_tokens=10.0,
    observation_sigma=0.2,
    action_tokens=6.0,
    action_sigma=0.5,
    step_s=0.5,
    step_sigma=0.5,
    reset_s=2.0,
)


def workload(wait: WaitProfile | None = None) -> Workload:
    return Workload(0, PROFILE, max_turns=16, max_context_tokens=128, max_new_tokens_per_turn=8, wait=wait)


def cluster_of(engine_ranks: dict[int, tuple[int, ...]], actor_rank: int, budget: int = 512) -> SimCluster:
    return SimCluster(engine_ranks, [actor_rank], COST, workload(), EngineSettings(MODEL, budget))


def micro_batch(update: int = 1, index: int = 0, tokens: int = 100) -> MicroBatch:
    mask = np.arange(tokens) >= 60
    sequence = Sequence(
        trajectory_id=0,
        prompt_id=0,
        member=0,
        ids=np.zeros(tokens, np.int32),
        loss_mask=mask,
        logprobs=np.zeros(tokens, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        reward=1.0,
        group_rewards=np.ones(1),
    )
    return MicroBatch(update, 0, index, (sequence,))


def now() -> float:
    return asyncio.get_running_loop().time()


def test_an_update_costs_its_tokens_one_thing_after_the_other() -> None:
    async def main() -> tuple[float, dict[str, float]]:
        cluster = cluster_of({0: (0,)}, 1)
        mb = micro_batch()
        # Asked for at the same moment: the rank still does one after the other.
        await asyncio.gather(cluster.references[0].logprobs(mb), cluster.actors[0].forward(mb))
        await cluster.update.begin(1, [1])
        await cluster.actors[0].backward(mb, None)
        stats = await cluster.update.finish()
        return now(), stats.metrics

    seconds, metrics = run_virtual(main)
    per_token = COST.reference_token_s + COST.forward_token_s + COST.backward_token_s
    assert seconds == pytest.approx(100 * per_token + COST.optimizer_s)
    assert metrics == {"tokens": 100.0, "loss_tokens": 40.0}


def test_the_model_that_is_not_there_is_loaded_first_and_only_then() -> None:
    cost = replace(COST, swap_one_way_s=0.25)

    async def main() -> float:
        cluster = SimCluster({0: (0,)}, [1], cost, workload(), EngineSettings(MODEL, 512))
        first, second = micro_batch(index=0), micro_batch(index=1)
        actor, reference = cluster.actors[0], cluster.references[0]
        await reference.logprobs(first)  # the actor was there: one load
        await reference.logprobs(second)
        await cluster.update.begin(1, [1])
        for mb in (first, second):
            await actor.forward(mb)  # one load for both
            await actor.backward(mb, None)
        await cluster.update.finish()
        return now()

    tokens = 200 * (COST.reference_token_s + COST.actor_token_s)
    assert run_virtual(main) == pytest.approx(tokens + COST.optimizer_s + 2 * 0.25)


SYNC = replace(COST, publish_s=1.0, load_s=2.0, delta_fraction=0.1)


def sync_seconds(kind: TransferKind) -> tuple[float, float, float]:
    """Of publishing, of loading it on two engines at once, and of a forward asked for 0.5 s into the load."""

    async def main() -> tuple[float, float, float]:
        cluster = SimCluster({0: (0,), 1: (1,)}, [2], SYNC, workload(), EngineSettings(MODEL, 512), weight_sync=kind)
        for engine in cluster.engines.values():
            await engine.load_weights(WeightHandle(0, "", 1))
        start = now()
        handle = await cluster.update.export(1)
        published = now() - start
        loads = [asyncio.ensure_future(engine.load_weights(handle)) for engine in cluster.engines.values()]
        await asyncio.sleep(0.5)
        await cluster.actors[0].forward(micro_batch())
        forwarded = now() - start - published - 0.5 - 100 * SYNC.forward_token_s
        await asyncio.gather(*loads)
        assert [engine.stats.version for engine in cluster.engines.values()] == [1, 1]
        return published, max(now() - start - published, 0.0), forwarded

    return run_virtual(main)


def test_a_relay_leaves_the_trainer_alone_and_a_broadcast_does_not() -> None:
    assert sync_seconds("relay") == pytest.approx((1.0, 2.0, 0.0))
    # One collective for both engines, and the trainer in it until its end.
    assert sync_seconds("broadcast") == pytest.approx((0.0, 2.0 + 100 * SYNC.forward_token_s, 1.5))


def test_a_delta_costs_what_changed_and_everything_for_an_empty_engine() -> None:
    published, loaded, _ = sync_seconds("delta")
    assert published == pytest.approx(0.1)
    assert loaded == pytest.approx(max(0.2, 0.5 + 100 * SYNC.forward_token_s))

    async def main(have: int, want: int) -> float:
        rank = SimRank(0)
        transfer = SimTransfer(SYNC, SimRank(1), "delta")
        await transfer.load([rank], have, want)
        return now()

    assert run_virtual(lambda: main(-1, 5)) == pytest.approx(2.0)
    assert run_virtual(lambda: main(2, 5)) == pytest.approx(3 * 0.2)
    assert run_virtual(lambda: main(2, 50)) == pytest.approx(2.0), "never more than everything"


def test_a_broadcast_whose_sender_dies_is_read_instead() -> None:
    async def main() -> float:
        cluster = SimCluster({0: (0,)}, [1], SYNC, workload(), EngineSettings(MODEL, 512), weight_sync="broadcast")
        load = asyncio.ensure_future(cluster.engines[0].load_weights(WeightHandle(0, "", 1)))
        await asyncio.sleep(0.5)
        cluster.lose(1)
        await load
        return now()

    assert run_virtual(main) == pytest.approx(0.5 + 2.0)


def test_backward_without_forward_and_overlapping_updates_are_refused() -> None:
    async def main() -> None:
        cluster = cluster_of({0: (0,)}, 1)
        await cluster.update.begin(1, [1])
        with pytest.raises(InvariantViolation, match="not forwarded"):
            await cluster.actors[0].backward(micro_batch(), None)
        with pytest.raises(InvariantViolation, match="within update 1"):
            await cluster.update.begin(2, [1])
        with pytest.raises(ConfigurationError, match="not yet supported"):
            await cluster.update.begin(1, [1, 2])

    run_virtual(main)


def test_a_checkpoint_comes_back_and_a_missing_one_does_not() -> None:
    async def main() -> None:
        update = cluster_of({0: (0,)}, 1).update
        await update.save("one")
        await update.restore("one")
        with pytest.raises(CheckpointError):
            await update.restore("two")

    run_virtual(main)


def test_lost_rank_is_reported_twice_and_its_work_fails() -> None:
    async def main() -> tuple[RankChange, RankChange]:
        cluster = cluster_of({0: (0,)}, 1)
        forward = asyncio.ensure_future(cluster.actors[0].forward(micro_batch(tokens=128)))
        await asyncio.sleep(1e-4)
        cluster.lose(1, "killed")
        with pytest.raises(RankLost):
            await forward
        cluster.restore(1)
        await cluster.actors[0].forward(micro_batch(tokens=128))
        return await cluster.next_change(), await cluster.next_change()

    lost, back = run_virtual(main)
    assert lost == RankChange(1, lost=True, reason="killed") and back == RankChange(1, lost=False)


@pytest.mark.parametrize(
    ("engine_ranks", "actor_rank"), [({}, 0), ({0: (0,), 1: (0,)}, 1), ({0: (0,)}, 2), ({0: (1,)}, 2)]
)
def test_impossible_layouts_are_refused(engine_ranks: dict[int, tuple[int, ...]], actor_rank: int) -> None:
    with pytest.raises(ConfigurationError, match="impossible ranks"):
        cluster_of(engine_ranks, actor_rank)


def test_kv_beyond_the_simulated_memory_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="do not fit"):
        cluster_of({0: (0,)}, 1, budget=COST.kv_capacity_tokens + 1)


def test_environment_takes_the_seconds_and_says_the_lengths_that_were_drawn() -> None:
    async def main() -> None:
        drawn, key = workload(), TaskKey("train", 3, 1)
        environments = SimEnvironments(drawn, slots=1, deadline_s=30.0, eval_prompts=5)
        handle = await environments.open(key, Prompt("train-0"))
        start = now()
        assert (await handle.reset()).parts == (TokenCount(15),)
        assert now() - start == pytest.approx(drawn.reset_s(key))
        for turn in range(drawn.turns(key)):
            start = now()
            step = await handle.step(Action(""))
            assert now() - start == pytest.approx(drawn.step_s(key, turn))
            assert step.observation.parts == (TokenCount(drawn.observation_tokens(key, turn)),)
            assert step.terminated == (turn == drawn.turns(key) - 1)
        assert step.reward == float(drawn.succeeds(key)) and step.info == {"success": drawn.succeeds(key)}

    run_virtual(main)


def test_a_step_beyond_the_deadline_times_out_at_the_deadline() -> None:
    async def main() -> float:
        slow = workload(WaitProfile(median_s=50.0, sigma=0.0))
        environments = SimEnvironments(slow, slots=1, deadline_s=30.0, eval_prompts=5)
        handle = await environments.open(TaskKey("train", 0, 0), Prompt("train-0"))
        await handle.reset()
        start = now()
        with pytest.raises(EnvironmentTimeout):
            await handle.step(Action(""))
        return now() - start

    assert run_virtual(main) == pytest.approx(30.0)


def test_a_share_of_steps_never_answers_and_a_share_raises_for_each_attempt_anew() -> None:
    faulty = msgspec.structs.replace(PROFILE, timeout_fraction=0.1, failure_fraction=0.2)
    drawn = Workload(0, faulty, max_turns=16, max_context_tokens=128, max_new_tokens_per_turn=8)
    keys = [TaskKey("train", prompt, member) for prompt in range(500) for member in range(4)]
    faults = [drawn.fault(key, turn) for key in keys for turn in range(-1, 4)]
    assert faults.count("timeout") / len(faults) == pytest.approx(0.1, abs=0.01)
    assert faults.count("failure") / len(faults) == pytest.approx(0.2, abs=0.015)
    failing = next(key for key in keys if drawn.fault(key, 0) == "failure")
    again = [drawn.fault(TaskKey("train", failing.prompt_id, failing.member, attempt), 0) for attempt in range(1, 9)]
    assert None in again, "a retry is drawn anew"

    async def main(fault: str, error: type[Exception]) -> float:
        key = next(key for key in keys if drawn.fault(key, -1) is None and drawn.fault(key, 0) == fault)
        environments = SimEnvironments(drawn, slots=1, deadline_s=30.0, eval_prompts=5)
        handle = await environments.open(key, Prompt("train-0"))
        await handle.reset()
        start = now()
        with pytest.raises(error):
            await handle.step(Action(""))
        return now() - start - (drawn.step_s(key, 0) if fault == "failure" else 30.0)

    assert run_virtual(lambda: main("timeout", EnvironmentTimeout)) == pytest.approx(0.0)
    assert run_virtual(lambda: main("failure", EnvironmentRaised)) == pytest.approx(0.0)


def test_an_environment_is_reset_once_and_before_its_steps() -> None:
    async def main() -> None:
        environments = SimEnvironments(workload(), slots=1, deadline_s=30.0, eval_prompts=5)
        handle = await environments.open(TaskKey("train", 0, 0), Prompt("train-0"))
        with pytest.raises(InvariantViolation, match="before reset"):
            await handle.step(Action(""))
        await handle.reset()
        with pytest.raises(InvariantViolation, match="once"):
            await handle.reset()

    run_virtual(main)
