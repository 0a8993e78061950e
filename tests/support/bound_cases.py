"""Random workloads, resources and habits for the clairvoyant bound, and one family for each resource that can bind."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from support.slow_scheduler import Habits, SlowScheduler

from tiderl.cost.bound import Bound, clairvoyant_bound
from tiderl.cost.model import CostModel
from tiderl.cost.resources import Resources
from tiderl.cost.work import Demand, GroupWork, demand, group_work, trajectory_work

COST = CostModel(
    iteration_s=7.5e-3,
    sequence_s=4e-5,
    context_token_s=3e-8,
    prefill_token_s=3.5e-5,
    max_batch=256,
    kv_capacity_tokens=10**6,
    reference_token_s=3.8e-5,
    forward_token_s=3.8e-5,
    backward_token_s=7.6e-5,
    optimizer_s=0.05,
    publish_s=0.0,
    load_s=0.0,
    swap_one_way_s=0.0,
    checkpoint_s=0.0,
    weight_bytes=0,
)


@dataclass(frozen=True)
class Case:
    groups: tuple[GroupWork, ...]
    cost: CostModel
    resources: Resources

    @property
    def work(self) -> Demand:
        limits = {"kv_tokens": self.resources.kv_tokens, "max_batch": self.resources.max_batch}
        return demand(self.groups, self.cost, **limits, with_reference=True)

    @property
    def bound(self) -> Bound:
        return clairvoyant_bound(self.work, self.resources)

    def seconds(self, habits: Habits, seed: int) -> float:
        """Of one legal run; with more groups than are consumed, over a random choice of them."""
        rng = random.Random(seed)
        wanted = self.resources.consumed_groups
        chosen = self.groups
        if len(chosen) > wanted:
            chosen = tuple(self.groups[number] for number in sorted(rng.sample(range(len(chosen)), wanted)))
        return SlowScheduler(chosen, self.cost, self.resources, habits, rng).seconds()

    def with_resources(self, **changes: object) -> Case:
        return replace(self, resources=replace(self.resources, **changes))  # type: ignore[arg-type]


def spread(rng: random.Random, lowest: float, highest: float) -> float:
    """Log-uniform."""
    return float(lowest * (highest / lowest) ** rng.random())


def random_groups(
    rng: random.Random, count: int, size: int, *, turns: int, decode: int, observed: int, env_s: float, tail: float
) -> tuple[GroupWork, ...]:
    groups = []
    for _ in range(count):
        scale = spread(rng, 0.5, 2.0)
        members = []
        for _ in range(size):
            slow = 8.0 if rng.random() < tail else 1.0
            members.append(
                trajectory_work(
                    [
                        (
                            rng.randint(1, max(1, round(decode * scale))),
                            rng.randint(1, max(1, observed)),
                            env_s * spread(rng, 0.3, 3.0) * slow,
                        )
                        for _ in range(rng.randint(1, turns))
                    ],
                    reset_s=env_s * rng.random(),
                )
            )
        groups.append(group_work(rng.randint(1, 30), members))
    return tuple(groups)


def random_case(seed: int) -> Case:
    """Small, with costs drawn over two decades, so that each resource has its turn."""
    rng = random.Random(seed)
    updates, size, members = rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 3)
    cost = replace(
        COST,
        iteration_s=spread(rng, 1e-3, 3e-2),
        sequence_s=spread(rng, 1e-5, 1e-2),
        context_token_s=spread(rng, 1e-8, 1e-5),
        prefill_token_s=spread(rng, 4e-4, 5e-3),
        reference_token_s=rng.choice((0.0, spread(rng, 1e-5, 5e-3))),
        forward_token_s=spread(rng, 1e-5, 1e-2),
        backward_token_s=spread(rng, 1e-5, 1e-2),
    )
    groups = random_groups(
        rng,
        updates * size + rng.choice((0, 0, rng.randint(1, 4))),
        members,
        turns=rng.randint(1, 4),
        decode=rng.randint(1, 10),
        observed=rng.randint(1, 20),
        env_s=rng.choice((0.0, spread(rng, 1e-3, 3.0))),
        tail=rng.choice((0.0, 0.1)),
    )
    largest = max(
        group.prompt_tokens + sum(turn.prefill_tokens + turn.decode_tokens for turn in task.turns)
        for group in groups
        for task in group.trajectories
    )
    rollout_ranks, trainer_ranks = rng.randint(1, 3), rng.randint(1, 3)
    shared_ranks = 0
    if rng.random() < 0.25:
        rollout_ranks = trainer_ranks = shared_ranks = rollout_ranks
    resources = Resources(
        updates=updates,
        batch_groups=size,
        max_staleness=rng.randint(0, 3),
        rollout_ranks=rollout_ranks,
        trainer_ranks=trainer_ranks,
        shared_ranks=shared_ranks,
        kv_tokens=round(largest * spread(rng, 1.0, 30.0)),
        max_batch=rng.choice((1, 2, 4, 64)),
        update_s=rng.choice((0.0, spread(rng, 1e-3, 1.0))),
        sync_s=rng.choice((0.0, spread(rng, 1e-3, 3.0))),
        streaming=rng.random() < 0.5,
        env_slots=rng.choice((None, rng.randint(1, 6))),
        slots_held=rng.choice(("step", "task")),
        link_s=rng.choice((0.0, spread(rng, 1e-3, 3.0))),
        publish_every_updates=rng.choice((None, 1)),
    )
    return Case(groups, cost, resources)


def random_habits(case: Case, seed: int) -> Habits:
    rng = random.Random(~seed)
    exact = len(case.groups) == case.resources.consumed_groups
    in_order = exact and rng.random() < 0.25
    can_reset_early = case.resources.env_slots is None or case.resources.slots_held == "step"
    return Habits(
        start="fifo" if in_order else rng.choice(("fifo", "random", "longest", "shortest")),
        laziness=rng.choice((0.0, 0.0, 0.2)),
        scatter=rng.random() < 0.5,
        keeps_kv=rng.random() < 0.7,
        recomputes=rng.random() < 0.5,
        resets_early=can_reset_early and rng.random() < 0.5,
        in_order=in_order,
        chunk_tokens=rng.choice((4, 64, 1000)),
        reference_ahead=rng.random() < 0.5,
    )


def _resources(**changes: object) -> Resources:
    plain = Resources(
        updates=8,
        batch_groups=4,
        max_staleness=1,
        rollout_ranks=2,
        trainer_ranks=2,
        kv_tokens=10**6,
        max_batch=64,
        update_s=0.0,
        sync_s=0.0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def _uniform(rng: random.Random, resources: Resources, **sizes: object) -> tuple[GroupWork, ...]:
    plain = {"turns": 3, "decode": 8, "observed": 5, "env_s": 0.0, "tail": 0.0}
    return random_groups(rng, resources.consumed_groups, 4, **{**plain, **sizes})  # type: ignore[arg-type]


CHEAP_TRAINING = replace(COST, reference_token_s=1e-7, forward_token_s=1e-7, backward_token_s=1e-7)
FAST_ROLLOUT = replace(COST, iteration_s=1e-4, sequence_s=1e-6)
BEST_HABITS = tuple(
    Habits(start=start, scatter=scatter, recomputes=False, chunk_tokens=1000, reference_ahead=True)
    for start, scatter in (("fifo", True), ("longest", True), ("fifo", False))
)
"""Simple schedules that waste nothing on purpose."""


def family(name: str, seed: int = 0) -> Case:
    """A workload in which one resource decides: the name is what must bind."""
    rng = random.Random(seed)
    match name:
        case "rollout":  # batches of 4, and memory that would not allow many more
            have = _resources(max_batch=4, max_staleness=3, kv_tokens=400, updates=16)
            return Case(_uniform(rng, have, turns=1, decode=30), CHEAP_TRAINING, have)
        case "kv":  # eight long contexts and the prompts of their two groups fit
            have = _resources(kv_tokens=8 * 230 + 2 * 150, max_staleness=3, updates=16)
            one = [trajectory_work([(1, 200, 0.0), (rng.randint(20, 30), 1, 0.0)]) for _ in range(4)]
            return Case(tuple(group_work(150, one) for _ in range(64)), CHEAP_TRAINING, have)
        case "trainer":
            have = _resources(max_staleness=3, rollout_ranks=3, trainer_ranks=1)
            cost = replace(FAST_ROLLOUT, reference_token_s=1e-3, forward_token_s=2e-3, backward_token_s=4e-3)
            return Case(_uniform(rng, have), cost, have)
        case "critical_path":
            have = _resources(max_staleness=0, rollout_ranks=3, streaming=False)
            groups = _uniform(rng, have, turns=4, env_s=1.0, tail=0.05)
            return Case(groups, replace(CHEAP_TRAINING, iteration_s=1e-4), have)
        case "environment":
            have = _resources(max_staleness=3, env_slots=4, slots_held="step")
            return Case(_uniform(rng, have, env_s=2.0), replace(CHEAP_TRAINING, iteration_s=2e-2), have)
        case "sync":
            have = _resources(updates=12, link_s=5.0, publish_every_updates=1, sync_s=5.0)
            return Case(_uniform(rng, have, turns=1), CHEAP_TRAINING, have)
        case "all_ranks":
            have = _resources(shared_ranks=2, max_staleness=0, updates=4, max_batch=4)
            cost = replace(COST, forward_token_s=1e-3, backward_token_s=2e-3)
            return Case(_uniform(rng, have, turns=1, decode=30), cost, have)
    raise ValueError(name)
