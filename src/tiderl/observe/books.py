"""Two running accounts from events: what became of every issued trajectory, and how long rollout waited.

Keeps I1 countable: issued = trained + dropped + in flight at every moment. Reads events only, never the journal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tiderl.data.events import Dropped, PromptIssued, RankState, RoleChanged, TaskAdmitted, UpdateCommitted

GROUP_DROPPED = "group_dropped"
"""The reason of the members that go because another member's failure gave the whole group up."""

INTERRUPTED = "lost"
"""The reason of what was in flight when a driver ended: its stop or death, nothing that the run did."""

ROLLOUT_WAITS = frozenset({"idle_staleness", "loading"})
"""Activities of a rollout rank that waits: for the trainer to consume, or for new weights."""


@dataclass
class _Group:
    """One prompt's members: every trajectory id each of them had, and who waits for a refill."""

    ids: dict[int, set[int]] = field(default_factory=dict)
    last_dropped: set[int] = field(default_factory=set)
    given_up: bool = False

    def issued(self, group_size: int) -> int:
        extra = sum(len(ids) - 1 for ids in self.ids.values())
        return group_size + extra + (0 if self.given_up else len(self.last_dropped))


class IssueBook:
    """`issued` counts trajectories: a group's members when its prompt is issued, each refill when its need arises."""

    def __init__(self) -> None:
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.dropped_tokens: Counter[str] = Counter()
        self.lengths_known: Counter[str] = Counter()
        """Dropped trajectories by reason of which is known how far they had come: more than no token."""
        self.group_size = 0
        self._closed = 0
        self._open: dict[int, _Group] = {}

    @property
    def issued(self) -> int:
        return self._closed + sum(group.issued(self.group_size) for group in self._open.values())

    @property
    def dropped_tokens_mean(self) -> float | None:
        """Of those whose length is known."""
        known = self.lengths_known.total()
        return self.dropped_tokens.total() / known if known else None

    def dropped_tokens_mean_by_reason(self) -> dict[str, float]:
        return {
            reason: self.dropped_tokens[reason] / known for reason, known in sorted(self.lengths_known.items()) if known
        }

    @property
    def in_flight(self) -> int:
        """Running and ready."""
        return self.issued - self.trained - sum(self.dropped.values())

    def observe(self, event: PromptIssued | TaskAdmitted | Dropped | UpdateCommitted) -> None:
        match event:
            case PromptIssued():
                self._open[event.prompt_id] = _Group()
            case TaskAdmitted(split="train") if event.prompt_id in self._open:
                group = self._open[event.prompt_id]
                group.ids.setdefault(event.member, set()).add(event.trajectory_id)
                group.last_dropped.discard(event.member)
            case Dropped():
                self._drop(event)
            case UpdateCommitted():
                self.trained += event.trajectories
                for prompt_id in event.prompt_ids:
                    group = self._open.pop(prompt_id, _Group())
                    self._closed += group.issued(self.group_size)

    def _drop(self, event: Dropped) -> None:
        self.dropped[event.reason] += 1
        self.dropped_tokens[event.reason] += event.tokens
        self.lengths_known[event.reason] += event.tokens > 0
        group = self._open.setdefault(event.prompt_id, _Group())
        group.ids.setdefault(event.member, set()).add(event.trajectory_id)
        group.last_dropped.add(event.member)
        group.given_up |= event.reason == GROUP_DROPPED
        if group.given_up and len(group.last_dropped) >= self.group_size:  # nothing more comes of it
            self._closed += self._open.pop(event.prompt_id).issued(self.group_size)


class WaitBook:
    """Rank-seconds of rollout ranks in `ROLLOUT_WAITS` since `start_s`; a rank that trains meanwhile does not wait."""

    def __init__(self) -> None:
        self.start_s: float | None = None
        self.rank_seconds = 0.0
        self.rollout_ranks: set[int] = set()
        self._since: dict[int, tuple[float, str]] = {}
        self._acting: set[int] = set()

    def observe(self, event: RankState | RoleChanged) -> None:
        if isinstance(event, RankState) and event.role != "rollout":
            return
        self._settle(event.rank, event.t_s)
        if isinstance(event, RoleChanged):
            (self._acting.discard if event.to_role == "rollout" else self._acting.add)(event.rank)
            return
        self._since[event.rank] = (event.t_s, event.activity)
        self.rollout_ranks.add(event.rank)

    def forget(self) -> None:
        """A driver starts (again): what an earlier one's ranks did is over."""
        self._since.clear()
        self._acting.clear()

    def settle(self, now_s: float) -> None:
        """Bring the account up to `now_s`."""
        for rank in self._since:
            self._settle(rank, now_s)

    def _settle(self, rank: int, now_s: float) -> None:
        if rank not in self._since:
            return
        since, activity = self._since[rank]
        waits = activity in ROLLOUT_WAITS and rank not in self._acting
        if waits and self.start_s is not None:
            self.rank_seconds += max(0.0, now_s - max(since, self.start_s))
        self._since[rank] = (now_s, activity)
