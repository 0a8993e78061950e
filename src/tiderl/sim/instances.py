"""The small instance of a file that a seed of a swarm means, as overrides of the file.

Everything is drawn from a stream of its own name, so that a new draw shifts no other. Pure: no port, no run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiderl.data.rng import stream

MAX_RANKS, MAX_GROUPS, MAX_MEMBERS, MAX_UPDATES, MAX_STALENESS, MAX_TURNS = 6, 4, 4, 6, 4, 8
"""An instance has at most these: about 0.1 to 0.3 s of one core."""
PRIORITIES = ("tiers", "weighted", "deadlines")
PRIORITY_WEIGHTS = ("evaluation", "group", "active", "context")
LARGE_PROMPT = 20
"""In an instance with two kinds of tasks the prompt of one is so many times as long as the other's."""


@dataclass(frozen=True)
class FileSize:
    """What an instance may not exceed, the file's own sizes, and what it may not change."""

    ranks: int
    global_batch_groups: int
    group_size: int
    updates: int
    max_turns: int
    max_context_tokens: int
    max_new_tokens_per_turn: int
    environment: Mapping[str, Any] | None
    """The file's `env`, in plain values; None: a mixture."""
    first_tokens: int
    """Of a first observation, in the median; of a mixture the largest."""
    turn_tokens: int
    """That a turn and its answer add, in the median."""
    kv_capacity_tokens: int
    """KV that the simulated memory of a replica holds."""
    kv_policy: str = "auto"
    """What the file or the command asks for."""
    images: bool = False
    """`sim.workload` is the file's own, so that it can say that observations are images."""
    offloads: bool = False
    """Its engines have host memory for KV."""

    def at_most(self, name: str, limit: int) -> int:
        return max(1, min(int(getattr(self, name)), limit))


class InstanceDraws:
    """The draws of one seed's instance, one stream for each name, so that a new one shifts no other."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def between(self, name: str, low: int, high: int) -> int:
        """A whole number from `low` to `high`, at least `low`."""
        return int(stream(self._seed, "swarm", name).integers(low, max(low, high) + 1))

    def one_of(self, name: str, *choices: Any) -> Any:
        return choices[self.between(name, 0, len(choices) - 1)]


def draw_instance(seed: int, file: FileSize) -> tuple[str, ...]:
    """The overrides that make the seed's instance of the file, as after `-o`."""
    draws = InstanceDraws(seed)
    between, one_of = draws.between, draws.one_of
    steps = between("steps", 1, 2)
    groups = steps * between("groups", 1, max(1, file.at_most("global_batch_groups", MAX_GROUPS) // steps))
    size = between("members", 2, file.at_most("group_size", MAX_MEMBERS))
    strategy = one_of("strategy", "areal", "areal", "areal", "sync")
    stale = strategy != "sync"
    staleness = between("staleness", 0, MAX_STALENESS) if stale else 0
    turns = between("turns", 1, file.at_most("max_turns", MAX_TURNS))
    ranks = between("ranks", 1, file.at_most("ranks", MAX_RANKS))
    context = file.max_context_tokens
    policy = one_of("kv policy", "lru", "ctb", "ctb") if file.kv_policy == "auto" else file.kv_policy
    by_task: dict[str, Any] = {}
    if policy == "ctb":
        replicas = ranks if not stale or ranks == 1 else ranks // 2
        by_task = _by_task(draws, file, turns, tasks_each=-(-(staleness + 1) * groups * size // replicas))
        context = by_task["rollout.max_context_tokens"]
    chosen: dict[str, Any] = {
        "seed": seed,
        "train.global_batch_groups": groups,
        "train.steps_per_batch": steps,
        "train.updates": between("updates", 2, file.at_most("updates", MAX_UPDATES)),
        "train.micro_batch_tokens": context * between("micro-batch", 1, 3),
        "algorithm.group_size": size,
        "algorithm.kl_coef": one_of("reference", 0.0, 0.01),
        "schedule.strategy": strategy,
        "schedule.max_staleness": staleness,
        "schedule.staleness_counts": one_of("counts", "oldest_token", "window") if stale else "oldest_token",
        "schedule.publish_every_updates": between("publish", 1, min(3, staleness + 1)),
        "cluster.ranks": ranks,
        "cluster.rollout_ranks": "auto",
        "rollout.max_turns": turns,
        "rollout.kv_policy": policy,
        "rollout.kv_budget_tokens": one_of("kv", "auto", "auto", context, min(2 * context, file.kv_capacity_tokens)),
        "checkpoint.every_updates": one_of("checkpoint", "auto", 1, 2, 3),
        "checkpoint.keep": between("keep", 1, 3),
        "eval.every_updates": between("eval", 0, 3),
        "eval.prompts": between("eval prompts", 1, 4),
    }
    if file.environment is not None:
        slots = one_of("slots", "auto", "auto", between("slot count", 1, 2 * groups * size))
        if "env" not in by_task:
            chosen["env.slots"] = slots
    return tuple(f"{key}={_written(value)}" for key, value in (chosen | by_task).items())


def _by_task(draws: InstanceDraws, file: FileSize, turns: int, *, tasks_each: int) -> dict[str, Any]:
    """What counts under `ctb` alone: the rules, and contexts and pools so small that tasks have to wait for room.
    `tasks_each`: tasks that one replica may have."""
    one_of = draws.one_of
    found: dict[str, Any] = {
        "rollout.growth_z": one_of("growth", 0.0, 1.0, 2.0),
        "rollout.patience_s": one_of("patience", 0.01, 0.3, 3.0, 30.0),
        "rollout.priority": one_of("priority", *PRIORITIES),
    }
    if found["rollout.priority"] == "weighted":
        weights = {name: one_of(f"weight of {name}", 0.0, 1.0, 8.0) for name in PRIORITY_WEIGHTS}
        found["rollout.priority_weights"] = weights
    first = file.first_tokens
    fits = LARGE_PROMPT * first + turns * file.turn_tokens <= file.kv_capacity_tokens
    if file.environment is not None and fits and one_of("sizes", False, False, True):
        rare = one_of("share of large prompts", 0.25, 1.0)
        found["env"] = [file.environment, {**file.environment, "weight": rare}]
        first = LARGE_PROMPT * first
    if file.images and one_of("images", False, False, True):
        window = draws.between("window", 1, 3)
        found["sim.workload.observation_images"] = True
        found["rollout.image_window"] = window
        found["rollout.image_window_drop"] = draws.between("window drop", 1, window)
    need = first + turns * file.turn_tokens
    least = max(first + file.turn_tokens, file.max_new_tokens_per_turn + 1)
    context = max(least, min(round(need * one_of("context", 0.75, 1.5, 3.0)), file.kv_capacity_tokens))
    found["rollout.max_context_tokens"] = context
    share = one_of("pool", None, 1.0, 0.5, 0.25, 0.1)
    if share is not None:
        found["rollout.kv_budget_tokens"] = max(context, min(round(share * tasks_each * need), file.kv_capacity_tokens))
    return found


def _written(value: Any) -> str:
    """As after the `=` of an override: JSON is YAML."""
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)
