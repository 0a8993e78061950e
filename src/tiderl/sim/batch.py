"""Continuous batching in virtual time: who is admitted, prefilled and decoded, and when the next change comes.

One iteration computes up to `prefill_tokens_per_step` tokens of context, in order of admission, and gives a token to
every sequence whose context is complete: those that decode, and those whose prefill ends in it. Keeps I4 through the KV
book and I6: a new version empties the cache, and what is in flight computes its context again. Knows no clock and no
asyncio: the engine tells it how many iterations have run.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tiderl.cost.model import CostModel
from tiderl.data.turns import FinishReason
from tiderl.sim.kv import KvBook
from tiderl.sim.requests import Request
from tiderl.sim.segment import Segment


@dataclass(frozen=True, slots=True)
class Finished:
    request: Request
    reason: FinishReason


class Batch:
    """The state of one engine between iterations."""

    def __init__(self, cost: CostModel, *, kv_budget_tokens: int, max_batch: int, prefill_tokens_per_step: int) -> None:
        self.cost = cost
        self.kv = KvBook(kv_budget_tokens)
        self.max_batch = max_batch
        self.prefill_tokens_per_step = prefill_tokens_per_step
        self.iterations = 0
        self.generated_tokens = self.prefilled_tokens = self.cached_tokens = 0
        self._waiting: list[tuple[float, int, Request]] = []  # heap: priority first, then arrival
        self._prefilling: dict[int, Request] = {}  # in order of admission
        self._decoding: dict[int, Request] = {}
        self._finishes: list[tuple[int, int]] = []  # heap of (iteration count, number); stale entries are skipped
        self._context_tokens = 0  # attended by the decoding sequences in the next iteration
        self._parts: list[tuple[Request, int]] = []  # tokens prefilled in each iteration of the present segment

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def decoding(self) -> int:
        return len(self._decoding)

    @property
    def prefilling_tokens_per_iteration(self) -> int:
        """Of the present segment."""
        return sum(tokens for _, tokens in self._parts)

    @property
    def resident_tokens(self) -> int:
        """KV positions computed: of waiting tasks and of running turns, after the last whole segment."""
        prefilling = sum(request.kv_tokens for request in self._prefilling.values())
        return self.kv.held_tokens + prefilling + self._context_tokens - len(self._decoding)

    def add(self, request: Request) -> None:
        heapq.heappush(self._waiting, (-request.turn.priority, request.number, request))

    def can_admit(self) -> bool:
        """Whether the first in the queue fits now. Nobody overtakes it: a large turn is not starved by small ones."""
        return bool(self._waiting and self.running < self.max_batch and self.kv.fits(self._waiting[0][2].need_tokens))

    def admit(self, now_s: float) -> None:
        """Move everyone who fits from the queue into the batch."""
        while self.can_admit():
            request = heapq.heappop(self._waiting)[2]
            held = self.kv.reserve(request.task, request.need_tokens)
            # The last position is always computed: its logits are the turn's first distribution.
            request.cached_tokens = min(held, len(request.turn.ids) - 1)
            request.prefill_left = len(request.turn.ids) - request.cached_tokens
            request.admitted_s = now_s
            self.cached_tokens += request.cached_tokens
            self._prefilling[request.number] = request

    def next_segment(self, now_s: float) -> Segment | None:
        """The iterations until the batch changes by itself; None when it is empty."""
        if not self.running:
            return None
        room = self.prefill_tokens_per_step
        self._parts = []
        completed = 0
        for request in self._prefilling.values():
            if room == 0:
                break
            tokens = min(room, request.prefill_left)
            self._parts.append((request, tokens))
            room -= tokens
            completed += tokens == request.prefill_left
        if completed:
            iterations = 1
        else:
            iterations = self._next_finish() - self.iterations if self._decoding else 1 << 60
            if self._parts:  # exactly one, larger than a step: it goes on by whole steps up to its last one
                request, tokens = self._parts[0]
                iterations = min(iterations, (request.prefill_left - 1) // tokens)
        cost = self.cost
        prefilled = self.prefill_tokens_per_step - room
        return Segment(
            start_s=now_s,
            iterations=iterations,
            constant_s=cost.iteration_s
            + cost.sequence_s * (len(self._decoding) + completed)
            + cost.prefill_token_s * prefilled,
            context_token_s=cost.context_token_s,
            context_tokens=self._context_tokens,
            growth_tokens=len(self._decoding),
        )

    def run(self, iterations: int, now_s: float) -> list[Finished]:
        """`iterations` of the present segment have run, the last one ending at `now_s`; returns who is done."""
        self.iterations += iterations
        self._context_tokens += iterations * len(self._decoding)
        self.generated_tokens += iterations * len(self._decoding)
        finished = []
        while self._decoding and self._next_finish() <= self.iterations:
            request = self._decoding[heapq.heappop(self._finishes)[1]]
            finished.append(self.end(request, request.finish_reason))
        parts, self._parts = self._parts, []
        if iterations:
            for request, tokens in parts:
                request.prefill_left -= tokens * iterations
                self.prefilled_tokens += tokens * iterations
                if request.prefill_left == 0 and self._first_token(request, now_s):
                    finished.append(self.end(request, request.finish_reason))
        return finished

    def end(self, request: Request, reason: FinishReason) -> Finished:
        """Take a request out, wherever it is, and free its reservation. Aborts end here too."""
        request.catch_up(self.iterations)
        request.over = True
        if request.admitted_s < 0:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            heapq.heapify(self._waiting)
            return Finished(request, reason)
        kv_tokens = request.kv_tokens
        if request.decoding:
            del self._decoding[request.number]
            self._context_tokens -= request.known_tokens
        else:
            del self._prefilling[request.number]
        self.kv.settle(request.task, kv_tokens if request.turn.retain and not request.released else 0)
        return Finished(request, reason)

    def new_version(self, old_version: int) -> None:
        """The weights changed: held KV is dropped, and running turns compute all of their context again (I6)."""
        self.kv.drop_held()
        for request in self._decoding.values():
            request.catch_up(self.iterations)
            request.decoding = False
        again = {**self._prefilling, **self._decoding}
        self._prefilling = {number: again[number] for number in sorted(again)}
        for request in self._prefilling.values():
            request.close_span(old_version)
            request.prefill_left = request.known_tokens
        self._decoding.clear()
        self._finishes.clear()
        self._context_tokens = 0

    def everyone(self) -> list[Request]:
        """All requests, running and waiting, in order of arrival."""
        requests = [
            *self._prefilling.values(),
            *self._decoding.values(),
            *(entry[2] for entry in self._waiting),
        ]
        return sorted(requests, key=lambda request: request.number)

    def _first_token(self, request: Request, now_s: float) -> bool:
        """The context is complete and a token sampled from it; True when that was the last one."""
        del self._prefilling[request.number]
        request.sampled += 1
        self.generated_tokens += 1
        if request.first_token_s < 0:
            request.first_token_s = now_s
        request.decoding = True
        request.settled_at = self.iterations
        request.finishes_at = self.iterations + request.target - request.sampled
        self._decoding[request.number] = request
        self._context_tokens += request.known_tokens
        if request.sampled == request.target:
            return True
        heapq.heappush(self._finishes, (request.finishes_at, request.number))
        return False

    def _next_finish(self) -> int:
        while True:
            iteration, number = self._finishes[0]
            request = self._decoding.get(number)
            if request is not None and request.finishes_at == iteration:
                return iteration
            heapq.heappop(self._finishes)
