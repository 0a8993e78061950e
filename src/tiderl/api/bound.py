"""The clairvoyant bound of a simulation: the very trajectories that it consumed, under its own costs and ranks.

Evaluation, warm start and dropped trajectories are in no term, so the bound holds whatever they cost. Under `window`
staleness there is none: nulls.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from tiderl.api.result import BOUND_FIGURES
from tiderl.config.resolve import Resolved
from tiderl.cost.bound import Bound, clairvoyant_bound
from tiderl.cost.model import CostModel
from tiderl.cost.resources import Resources
from tiderl.cost.work import GroupWork, demand, group_work, trajectory_work
from tiderl.data.records import TaskKey
from tiderl.data.settings import EngineSettings
from tiderl.runtime.ports import Replay
from tiderl.sim.behaviour import Behaviour, Plan
from tiderl.sim.mixture import WorkloadMixture


def bound_figures(bound: Bound | None, goodput_tokens_per_s: float | None) -> dict[str, Any]:
    """The keys of a result; all None without a bound."""
    if bound is None or goodput_tokens_per_s is None:
        return dict.fromkeys(BOUND_FIGURES)
    values = (
        bound.tokens_per_s,
        bound.rho(goodput_tokens_per_s),
        bound.rho_order(goodput_tokens_per_s),
        bound.binding,
    )
    return dict(zip(BOUND_FIGURES, values, strict=True))


def consumed_bound(
    resolved: Resolved, replay: Replay, workload: Behaviour | WorkloadMixture, cost: CostModel, engine: EngineSettings
) -> Bound | None:
    """The bound of the groups that the journal says were trained, in the order of their issue; None under `window` and
    before the first update."""
    members: dict[int, list[int]] = {}
    for row in replay.trajectories:
        if row.status == "trained":
            members.setdefault(row.prompt_id, []).append(row.member)
    # A group that was trained without being whole has no place in a batch of B.
    if not replay.updates or len(members) != len(replay.updates) * resolved.settings.global_batch_groups:
        return None
    return _bound(resolved, members, len(replay.updates), workload, cost, engine)


def planned_bound(
    resolved: Resolved, workload: Behaviour | WorkloadMixture, cost: CostModel, engine: EngineSettings
) -> Bound | None:
    """The bound of the first prompts that fill all updates, without a run: what it comes to if none is dropped."""
    settings = resolved.settings
    members = list(range(settings.group_size))
    prompts = range(settings.updates * settings.global_batch_groups)
    return _bound(resolved, dict.fromkeys(prompts, members), settings.updates, workload, cost, engine)


def _bound(
    resolved: Resolved,
    members: Mapping[int, list[int]],
    updates: int,
    workload: Behaviour | WorkloadMixture,
    cost: CostModel,
    engine: EngineSettings,
) -> Bound | None:
    settings = resolved.settings
    if settings.staleness_counts != "oldest_token":
        return None
    max_batch = min(engine.max_batch, cost.max_batch)
    work = demand(
        [_group(workload, prompt_id, members[prompt_id]) for prompt_id in sorted(members)],
        cost,
        kv_tokens=engine.kv_budget_tokens,
        max_batch=max_batch,
        with_reference=settings.uses_reference,
    )
    return clairvoyant_bound(work, _resources(resolved, updates, cost, engine.kv_budget_tokens, max_batch))


def _resources(resolved: Resolved, updates: int, cost: CostModel, kv_tokens: int, max_batch: int) -> Resources:
    settings, layout = resolved.settings, resolved.layout
    publish_s, load_s = _transfer_s(cost, resolved.config.sim.weight_sync)
    return Resources(
        updates=updates,
        batch_groups=settings.global_batch_groups,
        max_staleness=settings.max_staleness,
        rollout_ranks=len(layout.engine_ranks),
        trainer_ranks=len(layout.actor_ranks),
        shared_ranks=len(layout.shared_ranks),
        kv_tokens=kv_tokens,
        max_batch=max_batch,
        update_s=cost.optimizer_s * settings.steps_per_batch,
        sync_s=publish_s + load_s,
        streaming=True,
        env_slots=settings.slots,
        slots_held="task",
        link_s=publish_s,
        publish_every_updates=settings.publish_every_updates,
    )


def _transfer_s(cost: CostModel, kind: str) -> tuple[float, float]:
    """Least seconds of the trainer and of an engine for one version (`sim/transfer.py`)."""
    if kind == "broadcast":
        return 0.0, cost.load_s
    share = min(1.0, cost.delta_fraction) if kind == "delta" else 1.0
    return share * cost.publish_s, share * cost.load_s


def _group(workload: Behaviour | WorkloadMixture, prompt_id: int, members: list[int]) -> GroupWork:
    keys = [TaskKey("train", prompt_id, member, 0) for member in sorted(members)]
    own = workload.of(keys[0]) if isinstance(workload, WorkloadMixture) else workload
    trajectories = []
    for key in keys:
        plan = own.plan(key)
        waits = [turn.step_s for turn in plan.turns]
        waits[-1] += own.profile.score_s
        turns = [
            (turn.action_tokens, turn.observation_tokens, wait_s)
            for turn, wait_s in zip(plan.turns, waits, strict=True)
        ]
        trajectories.append(trajectory_work(turns, plan.reset_s, _forks(plan)))
    return group_work(min(own.first_tokens(key) for key in keys), trajectories, own.system_tokens)


def _forks(plan: Plan) -> dict[int, tuple[int, int]]:
    """As `trajectory_work` takes them. A turn keeps KV of all that it ended with but the last token."""
    found = {}
    for number, (before, turn) in enumerate(pairwise(plan.turns), start=1):
        if len(turn.rewrites) > len(before.rewrites):
            kept = turn.rewrites[-1]
            found[number] = (turn.context_tokens - kept, before.context_tokens + before.action_tokens - 1 - kept)
    return found
