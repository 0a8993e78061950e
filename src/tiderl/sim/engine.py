"""The simulated engine: the async Engine port of one replica, with one timer for each change of its batch.

What comes from outside (a turn, an abort, a pause, other work on its rank) takes effect at the end of the running
iteration, as on a rank host. Keeps I4 and I6 through its batch. Knows of the workload only how many tokens a turn says.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Protocol

from tiderl.cost.model import CostModel
from tiderl.data.errors import BudgetError, InvariantViolation, RankLost, RequestTooLarge
from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.settings import EngineSettings
from tiderl.data.turns import EngineCapabilities, EngineStats, FinishReason, PauseMode, Turn, TurnResult
from tiderl.sim.batch import Batch, Finished
from tiderl.sim.driver import SimDriver
from tiderl.sim.kv import Shared
from tiderl.sim.ranks import SimRank
from tiderl.sim.requests import Request
from tiderl.sim.segment import Segment
from tiderl.sim.transfer import SimTransfer

NOT_LOADED = -1
HOLDERS_SHOWN = 8


class Talk(Protocol):
    """What an engine has to know of its tasks."""

    def action_tokens(self, key: TaskKey, turn: int) -> int:
        """What the policy would say in the turn if nothing cut it short."""

    def shared_prompt(self, key: TaskKey) -> Shared:
        """(name, tokens) of what the task's context begins with and has in common with others', outermost first."""


class SimEngine:
    """One replica on `ranks`; they are all occupied while it loads weights.

    `said` is shared by all engines of a cluster: tokens already sampled of a turn that was interrupted, so that it goes
    on with the rest. `transfer`: how weights come here; without one they are read. `driver`: who takes up what ends.
    """

    def __init__(
        self,
        replica: int,
        ranks: Sequence[SimRank],
        cost: CostModel,
        settings: EngineSettings,
        talk: Talk,
        said: dict[TaskKey, tuple[int, int]],
        transfer: SimTransfer | None = None,
        driver: SimDriver | None = None,
    ) -> None:
        self.replica = replica
        self._ranks, self._cost, self._settings = tuple(ranks), cost, settings
        self._talk, self._said = talk, said
        self._transfer = transfer if transfer is not None else SimTransfer(cost, self._ranks[0])
        self._driver = driver if driver is not None else SimDriver(cost.driver_turn_s)
        self._numbers = itertools.count()
        self._version = NOT_LOADED
        self._paused = False
        self._holds = 0
        self._planned = False
        self._segment: Segment | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._arrival: asyncio.TimerHandle | None = None  # of KV from host memory
        self._pending: dict[TaskKey, Request] = {}
        self._ending: list[Request] = []  # aborted in the middle of an iteration
        self._halt_waiters: list[asyncio.Future[None]] = []
        self._batch = self._empty_batch()
        pool = self._batch.pool
        self.capabilities = EngineCapabilities(
            retain=True,
            offload=self._batch.host.budget_tokens > 0,
            kv_budget_tokens=pool.blocks * pool.block_tokens,
            kv_block_tokens=pool.block_tokens,
            max_batch=self._batch.max_batch,
            shares_prompts=settings.min_shared_tokens < settings.model.max_context_tokens,
            reload_token_s=cost.kv_reload_token_s,
            host_kv_tokens=self._batch.host.budget_tokens,
        )
        for rank in self._ranks:
            rank.engine = self

    # ------------------------------------------------------------------ the port

    @property
    def stats(self) -> EngineStats:
        """Of this moment, after the last whole iteration. `holders` is given when turns wait and none runs."""
        batch = self._batch
        self._grow()
        completed = self._segment.completed(_now()) if self._segment is not None else 0
        sampled = completed * batch.decoding
        prefilled = completed * batch.prefilling_tokens_per_iteration
        blocked = batch.waiting > 0 and batch.running == 0
        return EngineStats(
            version=self._version,
            running=batch.running,
            waiting=batch.waiting,
            resident_tokens=batch.resident_tokens + sampled + prefilled,
            budget_tokens=batch.pool.blocks * batch.pool.block_tokens,
            paused=self._paused,
            generated_tokens=batch.generated_tokens + sampled,
            prefilled_tokens=batch.prefilled_tokens + prefilled,
            prefilled_s=(batch.prefilled_tokens + prefilled) * batch.cost.prefill_token_s,
            cached_tokens=batch.cached_tokens,
            preemptions=batch.preemptions,
            offloaded_tokens=batch.host.tokens,
            held_tokens=batch.held_tokens,
            evicted_tokens=batch.evicted_tokens,
            holders=batch.pool.largest(HOLDERS_SHOWN) if blocked else (),
        )

    async def generate(self, turn: Turn) -> TurnResult:
        """As the port says. Before the first load turns wait."""
        if self._cost.turn_s:
            await asyncio.sleep(self._cost.turn_s)
        self._refuse(turn)
        request = self._request(turn)
        if request.target <= 0:
            return request.result("length", self._version, _now())
        self._pending[turn.task] = request
        self._batch.add(request)
        if self._segment is None:
            self._plan_soon()
        elif self._batch.can_admit():
            self._interrupt()
        try:
            result = await request.future
            await self._driver.take_up()
            return result
        except asyncio.CancelledError:
            self._abort(request)
            raise

    async def abort(self, task: TaskKey, turn: int) -> None:
        request = self._pending.get(task)
        if request is not None and request.turn.turn == turn:
            self._abort(request)
            await self.halted()

    def retain(self, task: TaskKey) -> None:
        self._grow()
        self._batch.touch(task)

    def release(self, task: TaskKey) -> None:
        """Forget the task's KV, and what it said of an interrupted turn: it is over."""
        self._grow()
        self._batch.forget(task)
        self._said.pop(task, None)
        for request in (*self._ending, self._pending.get(task)):
            if request is not None and request.task == task:
                request.released = True

    def offload(self, task: TaskKey) -> None:
        """Move a waiting task's KV to host memory; its next turn waits for the way back, not for a prefill."""
        if task not in self._pending:
            self._grow()
            self._batch.offload(task)

    async def pause(self, mode: PauseMode) -> None:
        self._paused = True
        self._interrupt()
        await self.halted()
        if mode == "abort":
            for request in self._batch.everyone():
                self._deliver(self._batch.end(request, "aborted"))

    async def resume(self) -> None:
        self._paused = False
        self._plan_soon()

    async def load_weights(self, handle: WeightHandle) -> None:
        self.hold()
        try:
            await self._transfer.load(self._ranks, self._version, handle.version)
            self._batch.new_version(self._version, _now())
            self._version = handle.version
        finally:
            self.unhold()

    # ------------------------------------------------------------------ for its ranks and its cluster

    def hold(self) -> None:
        """Start no further iteration until as many `unhold`."""
        self._holds += 1
        self._interrupt()

    def unhold(self) -> None:
        self._holds -= 1
        self._plan_soon()

    async def halted(self) -> None:
        """Returns at the end of the running iteration, at once when none runs."""
        if self._segment is not None:
            waiter = asyncio.get_running_loop().create_future()
            self._halt_waiters.append(waiter)
            await waiter

    def lose(self, reason: str) -> None:
        """Its process died: every turn fails with `RankLost`; weights and KV are gone."""
        self._drop_segment()
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
        pending = [*self._pending.values(), *self._ending]
        self._pending, self._ending = {}, []
        self._version, self._paused = NOT_LOADED, False
        self._batch = self._empty_batch()
        for request in pending:
            self._said.pop(request.task, None)
            if not request.future.done():
                request.future.set_exception(self._lost(reason))
        self._wake_halt_waiters()

    # ------------------------------------------------------------------ inside

    def _refuse(self, turn: Turn) -> None:
        if not all(rank.up for rank in self._ranks):
            raise self._lost("its process is down")
        need = len(turn.ids) + turn.sampling.max_new_tokens
        limit = min(self._settings.kv_budget_tokens, self._settings.model.max_context_tokens)
        if need > limit:
            raise RequestTooLarge(
                f"{len(turn.ids)} tokens of context and {turn.sampling.max_new_tokens} new ones never fit "
                f"{limit} tokens",
                where=f"task {turn.task}, turn {turn.turn}",
                hint="raise rollout.kv_budget_tokens or lower rollout.max_context_tokens",
            )
        if len(turn.ids) == 0:
            raise BudgetError("a turn needs at least one token of context", where=f"task {turn.task}")
        if turn.task in self._pending:
            raise BudgetError(
                f"turn {self._pending[turn.task].turn.turn} of the task still runs",
                where=f"task {turn.task}, turn {turn.turn}",
            )

    def _request(self, turn: Turn) -> Request:
        said_turn, said = self._said.get(turn.task, (turn.turn, 0))
        wanted = self._talk.action_tokens(turn.task, turn.turn) - (said if said_turn == turn.turn else 0)
        allowed = turn.sampling.max_new_tokens
        # A policy that has said all still samples one token more before it can stop.
        target = min(max(1, wanted), allowed)
        reason: FinishReason = "stop" if wanted <= allowed else "length"
        future = asyncio.get_running_loop().create_future()
        return Request(turn, next(self._numbers), target, reason, _now(), future)

    def _empty_batch(self) -> Batch:
        return Batch(self._cost, self._settings, self._talk.shared_prompt)

    def _plan_soon(self) -> None:
        # In the next pass, so that turns that come at the same instant share the iteration.
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._plan)

    def _plan(self) -> None:
        self._planned = False
        if self._segment is not None or self._holds or self._paused or self._version == NOT_LOADED:
            return
        self._batch.preempt()
        self._batch.admit(_now())
        self._segment = self._batch.next_segment(_now())
        self._set_timer()
        self._expect_arrival()

    def _grow(self) -> None:
        """What has begun by now has its KV, before anything is dropped or marked."""
        if self._segment is not None:
            self._batch.grow(self._segment.boundary(_now()))

    def _set_timer(self) -> None:
        if self._segment is not None:
            self._timer = asyncio.get_running_loop().call_at(self._segment.end_s, self._end_segment)

    def _expect_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None
        arrival_s = self._batch.next_arrival_s(_now())
        if arrival_s is not None:
            self._arrival = asyncio.get_running_loop().call_at(arrival_s, self._arrived)

    def _arrived(self) -> None:
        """A turn that waited for its KV can compute: from the next iteration on."""
        self._arrival = None
        self._interrupt()
        self._plan_soon()

    def _interrupt(self) -> None:
        """Let the segment end with the iteration that runs now; an iteration that starts now is taken back."""
        if self._segment is None:
            return
        boundary = self._segment.boundary(_now())
        if boundary == 0:
            self._drop_segment()
            self._wake_halt_waiters()
            self._plan_soon()
        elif boundary < self._segment.iterations:
            assert self._timer is not None
            self._timer.cancel()
            self._segment.iterations = boundary
            self._set_timer()

    def _end_segment(self) -> None:
        segment = self._segment
        if segment is None:
            raise InvariantViolation("an engine's timer fired without a segment", where=f"replica {self.replica}")
        self._segment = self._timer = None
        for finished in self._batch.run(segment.iterations, _now()):
            self._deliver(finished)
        ending, self._ending = self._ending, []
        for request in ending:
            if not request.over:
                self._deliver(self._batch.end(request, "aborted"))
        self._wake_halt_waiters()
        self._plan_soon()

    def _abort(self, request: Request) -> None:
        if self._pending.get(request.task) is not request:
            return
        self._interrupt()
        if self._segment is not None:
            del self._pending[request.task]
            self._ending.append(request)
        else:
            self._deliver(self._batch.end(request, "aborted"))
            if self._arrival is not None:  # others wait for KV only: what was freed may let somebody start
                self._plan_soon()

    def _deliver(self, finished: Finished) -> None:
        request, reason = finished.request, finished.reason
        if self._pending.get(request.task) is request:
            del self._pending[request.task]
        if reason == "aborted" and not request.released:
            turn, said = self._said.get(request.task, (request.turn.turn, 0))
            before = said if turn == request.turn.turn else 0
            self._said[request.task] = (request.turn.turn, before + request.sampled)
        if not request.future.done():
            request.future.set_result(request.result(reason, self._version, _now()))

    def _drop_segment(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._segment = self._timer = None

    def _wake_halt_waiters(self) -> None:
        waiters, self._halt_waiters = self._halt_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _lost(self, reason: str) -> RankLost:
        return RankLost(reason, where=f"replica {self.replica}")


def _now() -> float:
    return asyncio.get_running_loop().time()
