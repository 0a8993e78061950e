"""What a turn need not compute: KV that its own task holds, or that a member of its group has of the same prompt.

Keeps I6 and I8: only equal ids under the same version are reused. Shared is the computing, and the memory of waiting
tasks' prompts is not needed twice for it; each running turn still has a copy in its own row. Moves no tensors.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from tiderl.engines.host_pool import HostPool
from tiderl.engines.live_turn import LiveTurn
from tiderl.engines.residency import GroupKey, HeldKv, Residency, common_prefix

MIN_SHARED_TOKENS = 16  # shorter prompts are computed sooner than they are waited for


class Reuse(NamedTuple):
    """The first `tokens` positions of `kv` (a held entry's), or of `row` of the active region where `kv` is None."""

    tokens: int
    kv: Any = None
    row: int = -1


class Sources:
    """Where KV can be copied from in one step. Rows are added as they are known to be computed."""

    def __init__(self, residency: Residency, host: HostPool, version: int) -> None:
        self._residency, self._host, self._version = residency, host, version
        self._rows: dict[GroupKey, list[tuple[int, LiveTurn]]] = defaultdict(list)
        self._advancing: dict[GroupKey, list[LiveTurn]] = defaultdict(list)

    def add_row(self, row: int, live: LiveTurn, *, prefills: bool) -> None:
        """A row with `filled` positions; `prefills`: this step computes more of its context."""
        self._rows[live.group].append((row, live))
        if prefills:
            self._advancing[live.group].append(live)

    def best(self, live: LiveTurn) -> Reuse:
        """The most that can be copied now. The last id is always computed: the first token is sampled from its
        logits."""
        ids = live.known_ids[:-1]
        own = (live.own_kv, self._host.peek(live.turn.task))
        entries = [entry for entry in own if entry is not None]
        found = max((self._reuse(entry, ids) for entry in entries), key=_tokens, default=Reuse(0))
        shared = [self._reuse(entry, ids) for entry in self._residency.held_by_group(live.group)]
        shared += [
            Reuse(min(common_prefix(other.known_ids, ids), other.filled), None, row)
            for row, other in self._rows[live.group]
        ]
        best = max(shared, key=_tokens, default=found)
        return best if best.tokens >= max(MIN_SHARED_TOKENS, found.tokens + 1) else found

    def is_worth_waiting(self, live: LiveTurn, now: Reuse) -> bool:
        """Whether a sibling whose context advances in this very step will have a good deal more of the same ids.

        A turn waits for nothing else, so never for one that failed, left or stands still: no deadlock.
        """
        coming = (common_prefix(other.known_ids, live.known_ids[:-1]) for other in self._advancing[live.group])
        return max(coming, default=0) - now.tokens >= MIN_SHARED_TOKENS

    def _reuse(self, entry: HeldKv, ids: np.ndarray) -> Reuse:
        return Reuse(entry.usable_tokens(ids, self._version), entry.kv)


def prefix_to_keep(leaving: HeldKv, unstarted: list[LiveTurn], elsewhere: Sources) -> int:
    """How many tokens of an entry that is about to go a group's unstarted members share and find nowhere else."""
    wanted = [
        tokens
        for live in unstarted
        if (tokens := leaving.usable_tokens(live.known_ids[:-1], leaving.version))
        >= elsewhere.best(live).tokens + MIN_SHARED_TOKENS
    ]
    return max(wanted, default=0)


def _tokens(reuse: Reuse) -> int:
    return reuse.tokens
