"""L6: the interval program, which sees that work must fit between the commits that staleness puts around it.

Time is cut at the commits into intervals 1 … S. The rollout of update u happens in the intervals u-eta … u. Each
resource has its own variables z[v, u], the share of its total for update u that is spent in interval v: shares of
different resources differ, so one variable for all of them would not be a bound. Needs scipy (HiGHS), when solved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tiderl.cost.resources import Resources
from tiderl.cost.work import Demand

Terms = list[tuple[np.ndarray, np.ndarray | float]]
"""Columns of a row and their values."""
SOLVER_SLACK = 1.0e-6
"""Relative; ten times the solver's own tolerance, taken off its optimum so that it stays a bound."""


@dataclass
class _Rows:
    """Rows of `A x <= b` in coordinates."""

    values: list[np.ndarray] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    columns: list[np.ndarray] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def add(self, terms: Terms, limit: float) -> None:
        """One row: sum of values * columns at most `limit`."""
        for columns, values in terms:
            self.columns.append(columns)
            self.values.append(np.broadcast_to(np.asarray(values, dtype=np.float64), columns.shape))
            self.rows.append(np.full(columns.shape, len(self.limits)))
        self.limits.append(limit)


class _Program:
    """Columns: Delta[v], m[u], then x[g, u] (unless the order is given), then z[k, v, u].

    Every legal schedule gives a feasible point: its own intervals, its own assignment, its own spending. So the
    smallest sum of Delta is a bound.
    """

    def __init__(self, work: Demand, resources: Resources, *, scale_s: float, in_issue_order: bool) -> None:
        self.resources, self.scale_s, self.in_order = resources, scale_s, in_issue_order
        self.updates, self.groups = resources.updates, work.groups
        self.count = 2 * self.updates
        self.x: np.ndarray = np.empty((0, 0), dtype=np.int64)
        if not in_issue_order:
            self.x = self._columns(self.groups * self.updates).reshape(self.groups, self.updates)
        self.at_most, self.equal = _Rows(), _Rows()

    def _columns(self, count: int) -> np.ndarray:
        self.count += count
        return np.arange(self.count - count, self.count)

    def interval(self, first: int, last: int) -> np.ndarray:
        """Columns of Delta[first … last], cut to 1 … S."""
        return np.arange(max(first, 1) - 1, last)

    def consumed(self, weights: np.ndarray, updates: range) -> tuple[Terms, float]:
        """Sum of `weights` over the groups of `updates`, as terms of a row and a constant, in scaled seconds."""
        weights = weights / self.scale_s
        if self.in_order:
            size = self.resources.batch_groups
            return [], float(weights[(updates.start - 1) * size : (updates.stop - 1) * size].sum())
        return [(self.x[:, update - 1], weights) for update in updates], 0.0

    def spend(self, weights: np.ndarray, capacity: float) -> list[np.ndarray]:
        """A resource with `capacity` units a second, spent in the window of each update; returns, for each interval,
        the columns of what is spent in it."""
        eta, updates = self.resources.max_staleness, self.updates
        within: list[list[int]] = [[] for _ in range(updates)]
        for update in range(1, updates + 1):
            window = range(max(1, update - eta), update + 1)
            columns = self._columns(len(window))
            for interval, column in zip(window, columns, strict=True):
                within[interval - 1].append(int(column))
            terms, constant = self.consumed(weights / capacity, range(update, update + 1))
            self.at_most.add([*terms, (columns, -1.0)], -constant)
        spent = [np.array(columns) for columns in within]
        for interval, columns in enumerate(spent, 1):
            self.at_most.add([(columns, 1.0), (self.interval(interval, interval), -1.0)], 0.0)
        return spent

    def solve(self) -> float:
        from scipy.optimize import linprog
        from scipy.sparse import coo_array

        def matrix(rows: _Rows) -> object:
            where = (np.concatenate(rows.rows), np.concatenate(rows.columns))
            return coo_array((np.concatenate(rows.values), where), shape=(len(rows.limits), self.count))

        objective = np.zeros(self.count)
        objective[: self.updates] = 1.0
        equal = {} if not self.equal.limits else {"A_eq": matrix(self.equal), "b_eq": self.equal.limits}
        found = linprog(objective, A_ub=matrix(self.at_most), b_ub=self.at_most.limits, **equal, method="highs")
        # Feasible and bounded by construction; a solver that gives up gives no bound, which is the bound 0.
        return float(found.fun) * self.scale_s * (1.0 - SOLVER_SLACK) if found.status == 0 else 0.0


def interval_seconds(work: Demand, resources: Resources, *, scale_s: float, in_issue_order: bool = False) -> float:
    """The program's optimum in seconds. `scale_s`: about how long the run is, for the solver's sake."""
    program = _Program(work, resources, scale_s=scale_s, in_issue_order=in_issue_order)
    _assign(program, work)
    _wait(program, work)
    rollout = resources.rollout_ranks
    spent = [program.spend(work.count_s, rollout), program.spend(work.context_s, rollout)]
    program.spend(work.kv_token_s, rollout * resources.kv_tokens)
    if resources.env_slots is not None:
        # Resets may come before the window, so they are not in it: a group's latency is without them.
        inside = work.task_s if resources.slots_held == "task" else work.step_s
        program.spend(np.maximum(0.0, inside - work.reset_s), resources.env_slots)
    _train(program, work, spent)
    return program.solve()


def _assign(program: _Program, work: Demand) -> None:
    """x[g, u]: a group belongs to one update at most, an update has B."""
    if program.in_order:
        return
    size, wanted = program.resources.batch_groups, program.resources.consumed_groups
    for update in range(program.updates):
        program.equal.add([(program.x[:, update], 1.0)], size)
    rows = program.equal if work.groups == wanted else program.at_most
    for group in range(work.groups):
        rows.add([(program.x[group], 1.0)], 1.0)


def _wait(program: _Program, work: Demand) -> None:
    """m[u], the slowest group of update u, fits between the commit that it may start from and its own, with the wait
    for weights before it and the training that cannot begin earlier behind it."""
    resources, scale_s, eta = program.resources, program.scale_s, program.resources.max_staleness
    slowest = program.updates + np.arange(program.updates)
    latency = work.latency_s / scale_s
    size = resources.batch_groups
    if program.in_order:
        least = latency[: resources.consumed_groups].reshape(-1, size).max(axis=1)
        for update in range(program.updates):
            program.at_most.add([(slowest[[update]], -1.0)], -float(least[update]))
    else:
        for group in range(work.groups):
            for update in range(program.updates):
                program.at_most.add([(program.x[group, [update]], latency[group]), (slowest[[update]], -1.0)], 0.0)
        least = np.sort(latency)[: resources.consumed_groups][::-1][::size]
        program.at_most.add([(slowest, -1.0)], -float(least.sum()))
    for update in range(1, program.updates + 1):
        constant = resources.update_s / scale_s
        tail: Terms = []
        if not resources.streaming:
            tail, trained = program.consumed(work.train_s / resources.trainer_ranks, range(update, update + 1))
            constant += trained
        if update - 1 - eta >= 1:
            constant += resources.sync_s / scale_s
        window = program.interval(update - eta, update)
        program.at_most.add([*tail, (slowest[[update - 1]], 1.0), (window, -1.0)], -constant)


def _train(program: _Program, work: Demand, spent: list[list[np.ndarray]]) -> None:
    """The actor works on update u in interval u only; the reference may work ahead. On shared ranks both take turns
    with rollout, whose spending is `spent`."""
    resources, scale_s = program.resources, program.scale_s
    ranks, step = resources.trainer_ranks, resources.update_s / scale_s
    inside = work.actor_s if resources.streaming else work.train_s
    for update in range(1, program.updates + 1):
        own, so_far = range(update, update + 1), range(1, update + 1)
        terms, constant = program.consumed(inside / ranks, own)
        program.at_most.add([*terms, (program.interval(update, update), -1.0)], -constant - step)
        terms, constant = program.consumed(work.train_s / ranks, so_far)
        ahead = program.interval(1, update)
        program.at_most.add([*terms, (ahead, -1.0)], -constant - update * step / ranks)
        if not resources.shared_ranks:
            continue
        everyone, share = resources.ranks, resources.rollout_ranks / resources.ranks
        for rollout in spent:
            terms, constant = program.consumed(inside / everyone, own)
            now = [(rollout[update - 1], share), (program.interval(update, update), -1.0)]
            program.at_most.add([*terms, *now], -constant - step / everyone)
            terms, constant = program.consumed(work.train_s / everyone, so_far)
            until = [(columns, share) for columns in rollout[:update]]
            program.at_most.add([*terms, *until, (ahead, -1.0)], -constant - update * step / everyone)
