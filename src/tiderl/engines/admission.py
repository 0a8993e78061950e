"""Which turns run: admission by tokens in a fixed order, and preemption as the last resort when running turns grow.

Keeps I4 through `residency`. The order (priority, then arrival) is total and never changes, and the most senior running
turn never gives way, so someone always progresses and no turn is preempted for ever. Knows no rows and no tensors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from tiderl.engines.growth import Growth
from tiderl.engines.live_turn import LiveTurn
from tiderl.engines.residency import Residency

GROWTH_TOKENS = 16  # a reservation grows by this much: asking rarely is worth a few tokens held too early
SENIORITY = attrgetter("order")


class Admission:
    """The queue and the KV book of one replica."""

    def __init__(self, residency: Residency, growth_quantile: float) -> None:
        self.residency = residency
        self.preemptions = 0
        self._growth = Growth(growth_quantile)
        self._queue: list[LiveTurn] = []  # most senior first

    def push(self, live: LiveTurn) -> None:
        insort(self._queue, live, key=SENIORITY)

    def withdraw(self, live: LiveTurn) -> None:
        """Take a turn out of the queue, if it is there."""
        at = bisect_left(self._queue, live.order, key=SENIORITY)
        if at < len(self._queue) and self._queue[at] is live:
            del self._queue[at]

    def admit(self, free_rows: int, now_s: float) -> list[LiveTurn]:
        """Start queued turns in order while rows and budget allow; the first that does not fit holds back the rest.

        A turn reserves its context and what it will probably sample; one that was preempted reserves all it may need.
        """
        started: list[LiveTurn] = []
        while self._queue and len(started) < free_rows:
            live = self._queue[0]
            need = live.need_tokens
            if not live.preemptions:
                need = live.context_tokens + self._growth.expect(live.turn.sampling.max_new_tokens)
            if not self.residency.fits(need):
                break
            live.admitted(self.residency.reserve(live.turn.task, need), need, now_s)
            started.append(self._queue.pop(0))
        return started

    def make_room(self, running: list[LiveTurn]) -> list[LiveTurn]:
        """Let every running turn grow by its next token: evict waiting tasks first, then preempt from the junior end.

        Returns the preempted turns: their reservations are freed and they are queued again, with their tokens.
        """
        if all(live.length <= live.reserved_tokens for live in running):
            return []
        staying = sorted(running, key=SENIORITY)
        preempted: list[LiveTurn] = []
        at = 0
        while at < len(staying):
            live = staying[at]
            if live.length > live.reserved_tokens and not self._grow(live):
                preempted.append(self._preempt(staying.pop()))  # possibly `live` itself
            else:
                at += 1
        return preempted

    def ended(self, live: LiveTurn) -> None:
        """A turn came to its own end: learn how long turns are."""
        self._growth.observe(live.sampled_tokens, live.turn.sampling.max_new_tokens)

    def _grow(self, live: LiveTurn) -> bool:
        tokens = min(live.need_tokens, live.reserved_tokens + GROWTH_TOKENS)
        if not self.residency.grow(live.turn.task, tokens):
            return False
        live.reserved_tokens = tokens
        return True

    def _preempt(self, live: LiveTurn) -> LiveTurn:
        self.residency.settle(live.turn.task, None)
        live.preemptions += 1
        self.preemptions += 1
        self.push(live)
        return live
