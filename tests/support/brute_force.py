"""The exact optimum of tiny runs by exhaustion: every assignment to updates, every subset at every iteration.

One replica and one trainer rank, groups of one trajectory, one group an update, no prefill and no context costs: then
only who joins which iteration, and in which order groups are trained, is left to decide.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tiny:
    """Group g samples `turns[g]` tokens a turn, each followed by seconds of the environment."""

    turns: tuple[tuple[tuple[int, float], ...], ...]
    updates: int
    max_staleness: int
    iteration_s: float
    sequence_s: float
    train_token_s: float
    update_s: float
    sync_s: float
    max_batch: int

    def train_s(self, group: int) -> float:
        """The sequence: a prompt of one position, what was sampled, and one observed position between turns."""
        turns = self.turns[group]
        return self.train_token_s * (len(turns) + sum(tokens for tokens, _ in turns))


def optimum(tiny: Tiny) -> float:
    """Seconds of the fastest legal run."""
    groups = range(len(tiny.turns))
    return min(_fastest(tiny, order) for order in itertools.permutations(groups, tiny.updates))


def _fastest(tiny: Tiny, order: Sequence[int]) -> float:
    """With `order[u]` trained by update u + 1."""
    best = float("inf")
    seen: set[tuple[object, ...]] = set()
    # (now, (turn, tokens sampled in it, ready at) of each, seconds at which each was finished)
    stack = [(0.0, tuple((0, 0, 0.0) for _ in order), (None,) * len(order))]
    while stack:
        state = stack.pop()
        if state in seen:
            continue
        seen.add(state)
        now, progress, finished = state
        commits = _commits(tiny, order, finished)
        if len(commits) == tiny.updates:
            best = min(best, commits[-1])
            continue
        if now >= best:
            continue
        may_start = [_start_s(tiny, commits, update) for update in range(len(order))]
        open_tasks = [i for i in range(len(order)) if finished[i] is None]
        ready = [i for i in open_tasks if max(progress[i][2], may_start[i]) <= now]
        later = [max(progress[i][2], may_start[i]) for i in open_tasks if i not in ready]
        coming = [second for second in later if second < float("inf")]
        if coming:
            stack.append((min(coming), progress, finished))
        for size in range(1, min(len(ready), tiny.max_batch) + 1):
            subsets = itertools.combinations(ready, size)
            stack += [_iterate(tiny, order, now, progress, finished, chosen) for chosen in subsets]
    return best


def _iterate(tiny, order, now, progress, finished, chosen):  # type: ignore[no-untyped-def]
    end = now + tiny.iteration_s + tiny.sequence_s * len(chosen)
    new, done = list(progress), list(finished)
    for i in chosen:
        turn, sampled, _ = new[i]
        tokens, env_s = tiny.turns[order[i]][turn]
        if sampled + 1 < tokens:
            new[i] = (turn, sampled + 1, end)
        elif turn + 1 < len(tiny.turns[order[i]]):
            new[i] = (turn + 1, 0, end + env_s)
        else:
            done[i] = end + env_s
    return end, tuple(new), tuple(done)


def _commits(tiny: Tiny, order: Sequence[int], finished: Sequence[float | None]) -> list[float]:
    """Commit of each update so far: its group is finished and the update before is over."""
    commits: list[float] = []
    for update, end in enumerate(finished):
        if end is None:
            break
        begin = max([end, *commits[-1:]])
        commits.append(begin + tiny.train_s(order[update]) + tiny.update_s)
    return commits


def _start_s(tiny: Tiny, commits: Sequence[float], update: int) -> float:
    """When the weights are there that update `update` (from 0) may be generated with at the earliest."""
    needed = update - tiny.max_staleness
    if needed <= 0:
        return 0.0
    return commits[needed - 1] + tiny.sync_s if len(commits) >= needed else float("inf")
