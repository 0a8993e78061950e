"""Continuous batching in virtual time: who is admitted, prefilled, decoded or preempted, and when that changes next.

Before an iteration those whose KV does not fit any more are preempted, then those who fit are admitted. It computes up
to its chunk of context, in order of admission, and gives a token to every sequence whose context is complete. Keeps I4
through the pool and I6: a new version empties the cache, and what is in flight computes its context again. Knows no
clock and no asyncio: the engine tells it how many iterations have run.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from tiderl.cost.model import CostModel
from tiderl.data.records import TaskKey
from tiderl.data.settings import EngineSettings
from tiderl.data.turns import FinishReason, Turn
from tiderl.sim.growth import Growth
from tiderl.sim.host_kv import HostKv
from tiderl.sim.kv import BlockPool, Prefix, Shared, first_of_its_own
from tiderl.sim.requests import Request
from tiderl.sim.segment import Segment

WITHOUT_END = 1 << 60
"""Iterations until nothing changes by itself."""


@dataclass(frozen=True, slots=True)
class Finished:
    request: Request
    reason: FinishReason


class Batch:
    """The state of one engine between iterations. `shared(task)`: what its context has in common with others'."""

    def __init__(self, cost: CostModel, settings: EngineSettings, shared: Callable[[TaskKey], Shared]) -> None:
        self.cost = cost
        block = settings.kv_block_tokens
        # Whole blocks only, but as many as the largest turn that is not refused.
        largest = min(settings.kv_budget_tokens, settings.model.max_context_tokens)
        blocks = max(settings.kv_budget_tokens // block, -(-largest // block))
        self.host = HostKv(host_budget_tokens(settings, cost), cost.kv_reload_token_s)
        by_task = settings.kv_policy == "ctb"
        self.pool = BlockPool(blocks, block, settings.min_shared_tokens, by_task=by_task, spill=self._spill)
        self.max_batch = min(settings.max_batch, cost.max_batch)
        self.prefill_tokens = settings.prefill_tokens_per_step
        self.prefill_tokens_beside = min(self.prefill_tokens, settings.prefill_tokens_beside_decoding)
        self.iterations = 0
        self.generated_tokens = self.prefilled_tokens = self.cached_tokens = self.preemptions = 0
        self._shared = shared
        self._seats = itertools.count()
        self._waiting: list[tuple[float, int, Request]] = []  # heap: priority first, then arrival
        self._prefilling: dict[int, Request] = {}  # by seat, in order of admission
        self._decoding: dict[int, Request] = {}
        self._finishes: list[tuple[int, int]] = []  # heap of (iteration count, seat); stale entries are skipped
        self._context_tokens = 0  # attended by the decoding sequences in the next iteration
        self._growth = Growth(block)
        self._grown_to = 0  # the iteration count up to which growth is in the pool
        self._parts: list[tuple[Request, int]] = []  # tokens prefilled in each iteration of the present segment
        self._forks: dict[TaskKey, int] = {}  # forks of a task's context that its cached KV has gone through

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
        running = sum(request.kv_tokens for request in self._prefilling.values())
        running += self._context_tokens - len(self._decoding)
        return running - self.pool.shared * self.pool.block_tokens + self.held_tokens

    @property
    def held_tokens(self) -> int:
        """Of these, what no running turn uses."""
        return self.pool.cached * self.pool.block_tokens

    @property
    def evicted_tokens(self) -> int:
        return self.pool.evicted * self.pool.block_tokens

    def add(self, request: Request) -> None:
        self.pool.touch(request.task, request.turn.priority)  # it will be used before what only may come back
        shared = self._as_it_was(request.turn)
        request.prefixes = self.pool.prefixes(request.task, shared, len(request.turn.ids))
        heapq.heappush(self._waiting, (-request.turn.priority, request.number, request))

    def _as_it_was(self, turn: Turn) -> Shared:
        """What the turn's context still has in common with other tasks'. Its own KV is forgotten from where the first
        fork changed it that this KV has not gone through."""
        task, forks, shared = turn.task, len(turn.rewrites), self._shared(turn.task)
        if not forks:
            return shared
        unseen = turn.rewrites[self._forks.get(task, 0) :]
        if unseen:
            self.pool.cut(task, min(unseen))
            self.host.cut(task, min(unseen))
            self._forks[task] = forks
        return tuple(common for common in shared if common[1] <= min(turn.rewrites))

    # ------------------------------------------------------------------ before an iteration

    def preempt(self) -> None:
        """Send back who came last of the lowest priority, until the next position of everyone else has room. What a
        turn has sampled stays; its KV is cached until it is needed."""
        while self.pool.used + self._growth.next(self.iterations) > self.pool.blocks:
            running = itertools.chain(self._prefilling.values(), self._decoding.values())
            last = max(running, key=lambda request: (-request.turn.priority, request.seat))
            last.catch_up(self.iterations)
            self._leave(last, keep=not last.released)
            heapq.heappush(self._waiting, (-last.turn.priority, last.number, last))
            self.preemptions += 1

    def can_admit(self) -> bool:
        """Whether the first in the queue fits now. Nobody overtakes it: a large turn is not starved by small ones."""
        if not self._waiting or self.running >= self.max_batch:
            return False
        request = self._waiting[0][2]
        need = self.pool.need(request.prefixes, request.known_tokens)
        return self.pool.used + self._growth.next(self._grown_to) + need <= self.pool.blocks

    def admit(self, now_s: float) -> None:
        """Move everyone who fits from the queue into the batch."""
        pool = self.pool
        while self.can_admit():
            request = heapq.heappop(self._waiting)[2]
            request.mine, own = pool.take(request.task, request.prefixes, request.known_tokens)
            first = first_of_its_own(request.prefixes)
            missing = sum(prefix.blocks - prefix.cached for prefix in request.mine)
            cached = (first - missing + own) * pool.block_tokens
            request.blocks = pool.blocks_of(request.known_tokens) - first
            cached += self._reload(request, own, missing, now_s)
            request.prefill_left = request.known_tokens - cached
            request.computed = 0
            request.seat = next(self._seats)
            request.void_s = now_s
            if request.admitted_s < 0:
                request.admitted_s, request.cached_tokens = now_s, cached
                self.cached_tokens += cached
            self._prefilling[request.seat] = request

    def _reload(self, request: Request, own: int, missing: int, now_s: float) -> int:
        """How many positions come from host memory that are not in the pool, to be waited for: there are `own` blocks
        in it beyond the prefixes, and not `missing` of these."""
        pool, first = self.pool, first_of_its_own(request.prefixes)
        there = min(self.host.tokens_of(request.task), request.known_tokens - 1) // pool.block_tokens
        self.host.drop(request.task)
        blocks = missing + there - first - own if there >= first else 0
        request.ready_s = max((prefix.ready_s for prefix in request.prefixes), default=0.0)
        if blocks <= 0:
            return 0
        request.ready_s = max(request.ready_s, self.host.reload(blocks * pool.block_tokens, now_s))
        for prefix in request.mine:
            prefix.cached, prefix.ready_s = prefix.blocks, request.ready_s
        request.mine = []
        return blocks * pool.block_tokens

    def next_arrival_s(self, now_s: float) -> float | None:
        """When KV that is on its way from host memory is there next; None when nothing is on its way."""
        waiting = (request.ready_s for request in self._prefilling.values() if request.ready_s > now_s)
        return min(waiting, default=None)

    def next_segment(self, now_s: float) -> Segment | None:
        """The iterations until the batch changes by itself; None when nobody can compute."""
        decoding = len(self._decoding)
        chunk = room = self.prefill_tokens_beside if decoding else self.prefill_tokens
        self._parts = []
        completed = 0
        for request in self._prefilling.values():
            if room == 0:
                break
            if request.ready_s > now_s:
                continue
            tokens = min(room, request.prefill_left)
            self._parts.append((request, tokens))
            room -= tokens
            completed += tokens == request.prefill_left
        if not decoding and not self._parts:
            return None
        if completed:
            iterations = 1
        else:
            iterations = WITHOUT_END
            if decoding:
                free = self.pool.blocks - self.pool.used
                iterations = self._growth.fits(self.iterations, free, self._next_finish() - self.iterations)
            if self._parts:  # exactly one, larger than a step: it goes on by whole steps up to its last one
                request, tokens = self._parts[0]
                iterations = min(iterations, (request.prefill_left - 1) // tokens)
        cost = self.cost
        return Segment(
            start_s=now_s,
            iterations=iterations,
            constant_s=cost.iteration_s
            + cost.sequence_s * (decoding + completed)
            + cost.prefill_token_s * (chunk - room),
            context_token_s=cost.context_token_s,
            context_tokens=self._context_tokens,
            growth_tokens=decoding,
        )

    # ------------------------------------------------------------------ while and after they run

    def grow(self, iterations: int) -> None:
        """The first `iterations` of the present segment have begun: their KV is in the pool."""
        until = self.iterations + iterations
        if until > self._grown_to:
            self.pool.grow(self._growth.between(self._grown_to, until))
            self._grown_to = until

    def run(self, iterations: int, now_s: float) -> list[Finished]:
        """`iterations` of the present segment have run, the last one ending at `now_s`; returns who is done."""
        self.grow(iterations)
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
                request.computed += tokens * iterations
                self.prefilled_tokens += tokens * iterations
                if request.prefill_left == 0 and self._next_token(request, now_s):
                    finished.append(self.end(request, request.finish_reason))
        return finished

    def end(self, request: Request, reason: FinishReason) -> Finished:
        """Take a request out, wherever it is, and give its blocks back. Aborts end here too."""
        request.catch_up(self.iterations)
        request.over = True
        if request.seat < 0:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            heapq.heapify(self._waiting)
        else:
            keep = request.turn.retain and not request.released
            self._leave(request, keep=keep, priority=request.turn.priority)
        return Finished(request, reason)

    def touch(self, task: TaskKey) -> None:
        """A waiting task will come back soon."""
        self.pool.touch(task)

    def forget(self, task: TaskKey) -> None:
        """A task is over."""
        self.pool.forget(task, self._shared(task))
        self.host.drop(task)
        self._forks.pop(task, None)

    def _spill(self, task: TaskKey, tokens: int) -> None:
        """Pressure takes a task's KV: it goes to host memory, where that has room and loading is the faster way."""
        if tokens and self.cost.kv_reload_token_s < self.cost.prefill_token_s:
            self.host.put(task, tokens)

    def offload(self, task: TaskKey) -> None:
        """Move what a waiting task has to host memory, until its next turn; without room there it stays where it is."""
        tokens = self.pool.cached_tokens_of(task)
        if tokens and self.host.put(task, tokens):
            self.pool.drop(task)

    def new_version(self, old_version: int, now_s: float) -> None:
        """The weights changed: cached KV is dropped, and running turns compute all of their context again (I6)."""
        self.pool.forget_cached()
        self.host.clear()
        for request in self.everyone():
            request.catch_up(self.iterations)
            request.close_span(old_version)
        running = {**self._prefilling, **self._decoding}
        for request in self._decoding.values():
            self._stop_decoding(request)
            blocks = self.pool.blocks_of(request.known_tokens) - first_of_its_own(request.prefixes)
            self.pool.used += blocks - request.blocks  # its last token is context now: `preempt` makes room for it
            request.blocks = blocks
        self._decoding.clear()
        self._finishes.clear()
        self._prefilling = {seat: running[seat] for seat in sorted(running)}
        owned: dict[Prefix, None] = {}
        for request in self._prefilling.values():
            request.mine = [prefix for prefix in request.prefixes if prefix not in owned]
            owned.update(dict.fromkeys(request.mine))
            others = sum(prefix.blocks for prefix in request.prefixes if prefix not in request.mine)
            request.prefill_left = request.known_tokens - others * self.pool.block_tokens
            request.computed = 0
            request.void_s = now_s
            request.ready_s = now_s

    def everyone(self) -> list[Request]:
        """All requests, running and waiting, in order of arrival."""
        requests = [
            *self._prefilling.values(),
            *self._decoding.values(),
            *(entry[2] for entry in self._waiting),
        ]
        return sorted(requests, key=lambda request: request.number)

    # ------------------------------------------------------------------ inside

    def _leave(self, request: Request, *, keep: bool, priority: float | None = None) -> None:
        """Out of the batch; what it should have computed for others goes to the next of them. `priority`: of a turn
        that has ended."""
        kv_tokens = request.kv_tokens
        if request.decoding:
            del self._decoding[request.seat]
            self._stop_decoding(request)
        else:
            del self._prefilling[request.seat]
        mine, request.mine = request.mine, []
        for prefix in mine:
            blocks = min(request.computed // self.pool.block_tokens, prefix.blocks - prefix.cached)
            request.computed -= blocks * self.pool.block_tokens
            prefix.cached += blocks
        self.pool.give_back(request.task, request.prefixes, kv_tokens, request.blocks, keep=keep, priority=priority)
        for prefix in mine:
            if prefix.users:
                heir = next(other for other in self._prefilling.values() if prefix in other.prefixes)
                heir.mine = [p for p in heir.prefixes if p in heir.mine or p is prefix]
                heir.prefill_left += (prefix.blocks - prefix.cached) * self.pool.block_tokens
        request.seat = -1

    def _stop_decoding(self, request: Request) -> None:
        request.decoding = False
        self._growth.remove(request.phase)
        self._context_tokens -= request.known_tokens
        request.blocks = self.pool.blocks_of(request.known_tokens - 1) - first_of_its_own(request.prefixes)

    def _next_token(self, request: Request, now_s: float) -> bool:
        """The context is complete and a token sampled from it; True when that was the last one."""
        del self._prefilling[request.seat]
        for prefix in request.mine:
            prefix.cached = prefix.blocks
        request.mine = []
        request.phase = self._growth.add(request.known_tokens, self.iterations)
        request.sampled += 1
        self.generated_tokens += 1
        if request.first_token_s < 0:
            request.first_token_s = now_s
        else:
            request.recompute_s += now_s - request.void_s
        request.decoding = True
        request.settled_at = self.iterations
        request.finishes_at = self.iterations + request.target - request.sampled
        self._decoding[request.seat] = request
        self._context_tokens += request.known_tokens
        if request.sampled == request.target:
            return True
        heapq.heappush(self._finishes, (request.finishes_at, request.seat))
        return False

    def _next_finish(self) -> int:
        while True:
            iteration, seat = self._finishes[0]
            request = self._decoding.get(seat)
            if request is not None and request.finishes_at == iteration:
                return iteration
            heapq.heappop(self._finishes)


def host_budget_tokens(settings: EngineSettings, cost: CostModel) -> int:
    """Positions that the host holds for one replica: none where the engine's own memory is the host's."""
    if settings.host_kv_budget_tokens is not None:
        return settings.host_kv_budget_tokens
    return settings.kv_budget_tokens if cost.kv_reload_token_s > 0 else 0
