"""The clairvoyant bound: seconds that no legal schedule of a workload can beat, in closed forms and one linear program.

Valid for every schedule that keeps oldest-token staleness, whatever it knows beforehand: any order, placement, mode of
training, and free choice of which groups meet in an update. Under `window` staleness it is no bound and must not be
printed. In no term: KV computed again after a new version, packing, role changes, evaluation; they are losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tiderl.cost.interval_lp import interval_seconds
from tiderl.cost.resources import Resources
from tiderl.cost.work import Demand
from tiderl.data.errors import ConfigurationError

LP_GROUP_UPDATES = 2_048
"""Largest groups x updates for which the linear program is solved; it takes about two seconds there."""
LP_ORDERED_UPDATES = 200
"""Largest number of updates for which it is solved in issue order, where nothing is left to assign."""

RHO = "goodput / clairvoyant bound: any order of groups, oldest-token staleness within the bound, nothing recomputed"
RHO_ORDER = "goodput / the same bound with batches in issue order"


@dataclass(frozen=True)
class Bound:
    """Lower bounds on the seconds from the first issued task to the last committed update."""

    seconds: float
    terms: Mapping[str, float]
    """Closed forms by resource, seconds."""
    binding: str
    """The resource whose closed form is the largest."""
    lp_seconds: float | None
    """The interval program's; None above `LP_GROUP_UPDATES`."""
    order_seconds: float
    """The bound where update u consumes the u-th batch in issue order."""
    loss_tokens: float
    """Of the consumed groups, at most."""

    @property
    def method(self) -> str:
        if self.lp_seconds is not None:
            return "closed forms and interval program"
        return f"closed forms only: more than {LP_GROUP_UPDATES} groups x updates"

    @property
    def tokens_per_s(self) -> float:
        """Upper bound on goodput."""
        return self.loss_tokens / self.seconds

    @property
    def order_tokens_per_s(self) -> float:
        return self.loss_tokens / self.order_seconds

    def rho(self, tokens_per_s: float) -> float:
        """See `RHO`."""
        return tokens_per_s / self.tokens_per_s

    def rho_order(self, tokens_per_s: float) -> float:
        """See `RHO_ORDER`; above 1 only for a schedule that does not keep the order."""
        return tokens_per_s / self.order_tokens_per_s


def clairvoyant_bound(work: Demand, resources: Resources) -> Bound:
    """Bound `resources.updates` updates over groups given in issue order, of which the schedule may choose when there
    are more than it consumes (then each term takes the cheapest, and the issue order is that of the first ones).

    Raises `ConfigurationError` for fewer groups than the updates consume.
    """
    wanted = resources.consumed_groups
    if work.groups < wanted:
        raise ConfigurationError(
            f"{resources.updates} updates of {resources.batch_groups} groups consume {wanted}, given {work.groups}",
            where="workload",
        )
    terms = closed_forms(work, resources)
    seconds = max(terms.values())
    order_seconds = max(seconds, issue_order_seconds(work, resources))
    lp_seconds = None
    if work.groups * resources.updates <= LP_GROUP_UPDATES:
        lp_seconds = interval_seconds(work, resources, scale_s=seconds)
        seconds, order_seconds = max(seconds, lp_seconds), max(order_seconds, lp_seconds)
    if resources.updates <= LP_ORDERED_UPDATES:
        ordered = interval_seconds(work, resources, scale_s=order_seconds, in_issue_order=True)
        order_seconds = max(order_seconds, ordered)
    return Bound(
        seconds=seconds,
        terms=terms,
        binding=binding(terms, work, resources),
        lp_seconds=lp_seconds,
        order_seconds=order_seconds,
        loss_tokens=float(-_cheapest(-work.loss_tokens, wanted)),
    )


def closed_forms(work: Demand, resources: Resources) -> dict[str, float]:
    """Seconds by resource, each a bound by itself. `finish`: training that cannot begin before the last rollout."""
    n, updates = resources.consumed_groups, resources.updates
    rollout, trainer = resources.rollout_ranks, resources.trainer_ranks
    finish = resources.update_s
    if not resources.streaming:
        finish += _cheapest(work.train_s, resources.batch_groups) / trainer
    actor_s, train_s = _cheapest(work.actor_s, n), _cheapest(work.train_s, n)
    count_s, context_s = _cheapest(work.count_s, n), _cheapest(work.context_s, n)
    resident_s = _cheapest(work.kv_token_s, n) / resources.kv_tokens
    terms = {
        # L1. An iteration costs a0 once and holds at most max_batch tokens, so a0 / max_batch for each is a bound.
        "rollout": count_s / rollout + finish,
        # L1 again: it holds at most kv_tokens of context, so a0 * context / kv_tokens is one too. Both shares in one
        # sum, or the larger of both for each token, would count a0 twice. L2: a token keeps its context resident for
        # the iteration that makes it; never above L1 while no context is larger than kv_tokens.
        "kv": max(context_s, resident_s) / rollout + finish,
        # L3. Training starts when the first trajectory (streaming) or the B-th group is ready. An optimizer step
        # stops all actor ranks, at least one of the trainer's.
        "trainer": _first_ready_s(work, resources)
        + max((train_s + updates * resources.update_s) / trainer, actor_s / trainer + updates * resources.update_s),
        "critical_path": _critical_path_s(work, resources),
        # L7. After u updates a group in flight goes into the updates u+1 … u+1+eta: at most (eta + 1) * B are.
        "in_flight": (_cheapest(work.latency_s, n) + n * resources.update_s)
        / ((resources.max_staleness + 1) * resources.batch_groups),
    }
    if resources.env_slots is not None:
        # L4. Each slot serves one at a time.
        held = work.task_s if resources.slots_held == "task" else work.step_s
        terms["environment"] = _cheapest(held, n) / resources.env_slots + finish
    if resources.transfers and resources.link_s > 0:
        # L4 of the link. The last update's groups start from version S-1-eta or later, whose transfer comes after the
        # first commit and after every transfer before it.
        first_commit_s = float(work.shortest_s.min()) + resources.update_s
        transfers_s = resources.transfers * resources.link_s
        terms["sync"] = first_commit_s + transfers_s + float(work.latency_s.min()) + finish
    if resources.shared_ranks:
        # Le. Whatever a rank does at a time, all of them together do all of the work.
        terms["all_ranks"] = (max(count_s, context_s) + train_s + updates * resources.update_s) / resources.ranks
    return terms


def binding(terms: Mapping[str, float], work: Demand, resources: Resources) -> str:
    """The resource with the largest term; of a critical path made of waits for weights rather than of trajectories:
    `sync`."""
    name = max(terms, key=lambda term: terms[term])
    waits_s = max(0, resources.updates - resources.max_staleness - 1) * resources.sync_s
    if name == "critical_path" and waits_s > _slowest_in_batches(work, resources):
        return "sync"
    return name


def issue_order_seconds(work: Demand, resources: Resources) -> float:
    """L5 with update u made of the groups (u-1)B … uB-1: C_u >= C_(u-1-eta) + sync + slowest of the batch + its
    training, and C_u >= C_(u-1) + its training by the actor. Exact maxima instead of the partition lemma."""
    size, eta = resources.batch_groups, resources.max_staleness
    batches = slice(0, resources.consumed_groups)
    slowest = work.latency_s[batches].reshape(-1, size).max(axis=1)
    actor_s = work.actor_s[batches].reshape(-1, size).sum(axis=1) / resources.trainer_ranks
    train_s = work.train_s[batches].reshape(-1, size).sum(axis=1) / resources.trainer_ranks
    commits = [0.0]
    for update in range(1, resources.updates + 1):
        base = update - 1 - eta
        start = commits[base] + resources.sync_s if base >= 1 else 0.0
        tail = 0.0 if resources.streaming else train_s[update - 1]
        ready = start + slowest[update - 1] + tail
        commits.append(max(ready, commits[-1] + actor_s[update - 1]) + resources.update_s)
    return float(commits[-1])


def _critical_path_s(work: Demand, resources: Resources) -> float:
    """L5. A group of update u has no token older than version u-1-eta, so C_u >= C_(u-1-eta) + sync + m_u + tail, with
    m_u its slowest trajectory. The updates fall into eta+1 such chains, each no longer than T: their mean is a bound.
    For any assignment the j-th largest m_u is at least the (jB)-th largest latency (partition lemma). Commits are a
    step of the optimizer apart, so the chain that ends i updates early leaves i steps."""
    updates, step_s = resources.updates, resources.update_s
    chains = min(updates, resources.max_staleness + 1)
    seconds = _slowest_in_batches(work, resources) + updates * step_s
    seconds += (updates - chains) * resources.sync_s + chains * (chains - 1) / 2 * step_s
    if not resources.streaming:
        seconds += _cheapest(work.train_s, resources.consumed_groups) / resources.trainer_ranks
    return seconds / chains


def _slowest_in_batches(work: Demand, resources: Resources) -> float:
    """The least possible sum over updates of the slowest group: sorted, every B-th from the top."""
    shortest = np.sort(work.latency_s)[: resources.consumed_groups]
    return float(shortest[::-1][:: resources.batch_groups].sum())


def _first_ready_s(work: Demand, resources: Resources) -> float:
    if resources.streaming:
        return float(work.shortest_s.min())
    return float(np.sort(work.start_latency_s)[resources.batch_groups - 1])


def _cheapest(values: np.ndarray, count: int) -> float:
    """Sum of the `count` smallest: no choice of as many groups costs less."""
    if count >= len(values):
        return float(values.sum())
    return float(np.partition(values, count - 1)[:count].sum())
