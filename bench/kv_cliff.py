"""The KV cliff: tasks all started at once on one simulated replica, and what its cache finds of their contexts.

    python bench/kv_cliff.py [--tasks 64 128 … 1312] [--json]

One H100 with a 7B model and a WebShop-like workload; constants of a published collapse (about 12 % of context found and
650 tokens/s at 1,312 tasks). All figures are of virtual time: another machine prints the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict, dataclass

import numpy as np

from tiderl.cost.model import CostModel
from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.settings import EngineSettings, ModelSettings, WaitProfile, WorkloadProfile
from tiderl.data.turns import Sampling, Turn
from tiderl.sim.engine import SimEngine
from tiderl.sim.kv import Shared
from tiderl.sim.loop import run_virtual
from tiderl.sim.ranks import SimRank
from tiderl.sim.workload import Workload

TASKS = (64, 128, 256, 384, 512, 768, 1024, 1312)
GROUP = 8
KV_TOKENS = 900_000  # what one 80 GB H100 holds beside a 7B model in bfloat16
MAX_CONTEXT = 8192
BATCH = 256
SYSTEM_TOKENS = 32  # all that the contexts of different tasks have in common

COST = CostModel(
    iteration_s=7.5e-3,
    sequence_s=40e-6,
    context_token_s=29e-9,
    prefill_token_s=35e-6,
    max_batch=BATCH,
    kv_capacity_tokens=KV_TOKENS,
    reference_token_s=0.0,
    forward_token_s=0.0,
    backward_token_s=0.0,
    optimizer_s=0.0,
    publish_s=0.0,
    load_s=0.0,
    swap_one_way_s=0.0,
    checkpoint_s=0.0,
    weight_bytes=15_200_000_000,
)
PROFILE = WorkloadProfile(
    turns_median=8.0,  # 9.0 on average, after the cut at 20
    turns_sigma=0.55,
    first_observation_tokens=500.0,
    observation_tokens=250.0,
    observation_sigma=0.0,
    action_tokens=50.0,
    action_sigma=0.0,
    step_s=0.6,
    step_sigma=1.0,
    reset_s=2.0,
    group_correlation=0.6,
    system_tokens=float(SYSTEM_TOKENS),
)
WAIT = WaitProfile(median_s=0.0, sigma=0.0, tail_fraction=0.002, tail_s=(30.0, 120.0))
MODEL = ModelSettings(path="scratch", vocab_size=1, max_context_tokens=MAX_CONTEXT, pad_id=0, stop_ids=(0,))


@dataclass(frozen=True)
class Step:
    """One rollout step: every task from its reset to its end."""

    tasks: int
    kv_hit_fraction: float  # context tokens found in the cache, of all context tokens
    tokens_per_s: float  # sampled
    seconds: float
    turns_mean: float
    preemptions: int


class Talk:
    """As the workload says; groups share their whole prompt only where told so."""

    def __init__(self, workload: Workload, share_prompts: bool) -> None:
        self._workload, self._share = workload, share_prompts

    def action_tokens(self, key: TaskKey, turn: int) -> int:
        return self._workload.action_tokens(key, turn)

    def shared_prompt(self, key: TaskKey) -> Shared:
        shared = self._workload.shared_prompt(key)
        return shared if self._share else shared[:1]


def rollout_step(tasks: int, *, seed: int = 0, share_prompts: bool = False) -> Step:
    """`tasks` tasks in groups of 8, all started at once."""
    workload = Workload(
        seed, PROFILE, max_turns=20, max_context_tokens=MAX_CONTEXT, max_new_tokens_per_turn=512, wait=WAIT
    )
    settings = EngineSettings(
        MODEL, KV_TOKENS, max_batch=BATCH, prefill_tokens_per_step=8192, prefill_tokens_beside_decoding=8192
    )
    context = cached = sampled = turns = 0

    async def task(engine: SimEngine, key: TaskKey) -> None:
        nonlocal context, cached, sampled, turns
        plan = workload.plan(key)
        await asyncio.sleep(plan.reset_s)
        for number, turn in enumerate(plan.turns):
            ids = np.broadcast_to(np.int32(0), (turn.context_tokens,))
            result = await engine.generate(Turn(key, number, ids, Sampling(1.0, 512, ()), MAX_CONTEXT))
            context += turn.context_tokens
            cached += result.cached_tokens
            sampled += len(result.ids)
            turns += 1
            await asyncio.sleep(turn.step_s)
        engine.release(key)

    async def main() -> tuple[float, int]:
        engine = SimEngine(0, [SimRank(0)], COST, settings, Talk(workload, share_prompts), {})
        await engine.load_weights(WeightHandle(0, "", 0))
        async with asyncio.TaskGroup() as group:
            for number in range(tasks):
                group.create_task(task(engine, TaskKey("train", number // GROUP, number % GROUP)))
        return asyncio.get_running_loop().time(), engine.stats.preemptions

    seconds, preemptions = run_virtual(main)
    return Step(tasks, cached / context, sampled / seconds, seconds, turns / tasks, preemptions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="+", default=list(TASKS))
    parser.add_argument("--share-prompts", action="store_true", help="members of a group share their whole prompt")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    steps = [rollout_step(tasks, share_prompts=args.share_prompts) for tasks in args.tasks]
    if args.json:
        print(json.dumps([asdict(step) for step in steps]))
        return
    print("tasks  kv_hit_fraction  tokens/s  step s  turns  preemptions")
    for step in steps:
        print(
            f"{step.tasks:5}  {step.kv_hit_fraction:15.3f}  {step.tokens_per_s:8.0f}  {step.seconds:6.0f}  "
            f"{step.turns_mean:5.2f}  {step.preemptions:11}"
        )


if __name__ == "__main__":
    main()
