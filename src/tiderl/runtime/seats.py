"""Where a task's turns run: its place on a replica, from admission to its end.

`TaskSeats` applies `schedule.pool` (continuous task batching): a turn waits until its context has room, KV of waiting
tasks leaves by its price, and a task whose replica has no room for too long goes to another. Decides nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import numpy as np

from tiderl.data.events import Event
from tiderl.data.pools import PoolBook
from tiderl.data.records import TaskKey
from tiderl.data.turns import TurnResult
from tiderl.runtime.kv_events import migrated, paused, resumed, retention
from tiderl.runtime.ports import Engine, EnvironmentHandle
from tiderl.schedule.holding import Departure
from tiderl.schedule.pool import TaskPool, Verdict
from tiderl.schedule.rates import EngineRates
from tiderl.schedule.residents import Facts, Kind
from tiderl.schedule.tasks import KvRules

Left = Callable[[float | None], None]
"""Told that a task leaves and, when it is over, how long it lived in seconds."""


class TaskSeats:
    """The pools of all replicas, and the tasks that wait for room in them."""

    def __init__(
        self,
        engines: Mapping[int, Engine],
        rules: KvRules,
        emit: Callable[[Event], None],
        *,
        changed: Callable[[int], None],
        moved: Callable[[TaskKey, int, int], None],
        began: Callable[[TaskKey], None],
    ) -> None:
        """`changed`: there may be room for new tasks on a replica. `moved`: a task goes from one replica to another.
        `began`: the first context of a task is known."""
        self._engines, self._rules, self._emit = engines, rules, emit
        self._changed, self._moved, self._began = changed, moved, began
        self.kinds: dict[str, Kind] = {}
        self.pools = {replica: self._pool(engine) for replica, engine in engines.items()}
        self._waiting: dict[int, dict[TaskKey, asyncio.Future[None]]] = {replica: {} for replica in engines}
        self._seats: dict[int, dict[TaskKey, TaskSeat]] = {replica: {} for replica in engines}
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def _pool(self, engine: Engine) -> TaskPool:
        able, rules = engine.capabilities, self._rules
        return TaskPool(
            able.kv_budget_tokens or rules.unlimited_tokens,
            self.kinds,
            EngineRates(),
            max_turns=rules.max_turns,
            max_context_tokens=rules.max_context_tokens,
            block_tokens=able.kv_block_tokens,
            max_batch=able.max_batch,
            shares_prompts=able.shares_prompts,
            reload_token_s=able.reload_token_s if able.offload else None,
            host_tokens=able.host_kv_tokens,
            growth_z=rules.growth_z,
            patience_s=rules.patience_s,
            rule=rules.priority,
            weights=rules.weights,
        )

    def books(self) -> dict[int, PoolBook]:
        """By replica, as of now."""
        found = {}
        for replica, pool in self.pools.items():
            seats, waiters = self._seats[replica], self._waiting[replica]
            waiting = {key: seats[key].wanted_tokens for key, waiter in waiters.items() if not waiter.done()}
            found[replica] = PoolBook(pool.open, pool.budget_tokens, pool.used_tokens, len(pool), waiting)
        return found

    def seat(
        self,
        key: TaskKey,
        replica: int,
        kind: str,
        tokens: float,
        facts: Facts,
        *,
        left: Left,
    ) -> TaskSeat:
        """Admits the task; `tokens` as in `TaskPool.admit`."""
        self.pools[replica].admit(key, kind, (key.split, key.prompt_id), tokens, facts, _now())
        self._seats[replica][key] = TaskSeat(self, key, replica, left)
        return self._seats[replica][key]

    def void(self, replica: int) -> None:
        """Its engine has other weights, or is another process: the KV of waiting tasks is gone."""
        pool = self.pools[replica]
        pool.void()
        self.apply(replica, pool.pump(_now()))

    def open(self, replica: int, is_open: bool) -> None:
        """Whether turns can run there."""
        pool = self.pools[replica]
        if pool.open != is_open:
            pool.open = is_open
            self.void(replica)

    def migrate(self, versions: Mapping[int, int], oldest: Callable[[TaskKey], int | None]) -> None:
        """Tasks that waited for room longer than computing them anew elsewhere would take go where there is room.

        `versions`: of replicas that can take tasks; `oldest(task)`: the version it needs at least, None: it stays. Nor
        does it go where weights are older than those of its newest token (I6).
        """
        now_s = _now()
        for replica, pool in self.pools.items():
            before = len(pool)
            for key in pool.impatient(now_s):
                needs = oldest(key)
                if needs is None:
                    continue
                needs = max(needs, self._seats[replica][key].newest_version)
                to = self._roomy(pool, key, replica, [r for r, version in versions.items() if version >= needs])
                if to is None:
                    continue
                self._engines[replica].release(key)
                seat = self._seats[replica].pop(key)
                waiter = self._waiting[replica].pop(key)
                seat.replica = to
                self._seats[to][key], self._waiting[to][key] = seat, waiter
                self._emit(migrated(key, replica, to, "no_room" if pool.open else "lost", now_s))
                self._moved(key, replica, to)
                self.apply(to, pool.transfer(key, self.pools[to], now_s))
            if len(pool) < before:
                self.apply(replica, pool.pump(now_s))

    def _roomy(self, pool: TaskPool, key: TaskKey, replica: int, candidates: list[int]) -> int | None:
        """Where it can run at once: to wait elsewhere would only cost it its KV and its place. A rank that is away may
        stay away, so then it goes also where it has to wait."""
        kind, tokens = pool.size_of(key)
        wanted_tokens = self._seats[replica][key].wanted_tokens
        others = [
            r
            for r in candidates
            if r != replica
            and self.pools[r].open
            and (not pool.open or self.pools[r].used_tokens + wanted_tokens <= self.pools[r].budget_tokens)
        ]
        best = min(others, key=lambda r: (self.pools[r].booked_tokens, r), default=None)
        group = (key.split, key.prompt_id)
        return best if best is not None and self.pools[best].room_for(kind, tokens, _now(), group=group) else None

    def apply(self, replica: int, verdict: Verdict) -> None:
        """What the schedule decided about one replica, in its order: KV leaves before others take its room."""
        now_s = _now()
        for departure in verdict.departures:
            self._depart(replica, departure)
        for key in verdict.go:
            waiter = self._waiting[replica].pop(key, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        self._set_timer(replica, now_s)

    def _depart(self, replica: int, departure: Departure) -> None:
        key, engine = departure.key, self._engines[replica]
        if departure.choice == "offload":
            engine.offload(key)
        else:
            engine.release(key)

    def _set_timer(self, replica: int, now_s: float) -> None:
        timer = self._timers.pop(replica, None)
        if timer is not None:
            timer.cancel()
        due_s = self.pools[replica].next_due_s(now_s)
        if due_s is not None:
            self._timers[replica] = asyncio.get_running_loop().call_at(due_s, self._due, replica)

    def _due(self, replica: int) -> None:
        self._timers.pop(replica, None)
        self.apply(replica, self.pools[replica].pump(_now()))
        self._changed(replica)

    @property
    def active_s(self) -> float:
        """Mean seconds that a turn runs, over all replicas."""
        return sum(pool.rates.active_s for pool in self.pools.values()) / len(self.pools)

    # ------------------------------------------------------------------ for its seats

    def engine(self, replica: int) -> Engine:
        return self._engines[replica]

    async def enter(
        self,
        seat: TaskSeat,
        context_tokens: int,
        max_new_tokens: int,
        handle: EnvironmentHandle,
        first_ids: np.ndarray | None,
    ) -> None:
        key, pool = seat.key, self.pools[seat.replica]
        if not seat.began:
            seat.began = True
            self._began(key)
        seat.wanted_tokens = context_tokens + max_new_tokens
        verdict = pool.ask(key, context_tokens, max_new_tokens, _now(), first_ids=first_ids)
        if key in verdict.go:
            self._report_wait(seat)
            self.apply(seat.replica, verdict)
            return
        waiter = self._waiting[seat.replica][key] = asyncio.get_running_loop().create_future()
        self._emit(paused(key, seat.replica, "no_room" if pool.open else "lost", _now()))
        self.apply(seat.replica, verdict)
        self._changed(seat.replica)
        try:
            await handle.pause()
            await waiter
            await handle.resume()
        except BaseException:
            seat.close()  # it wants no room any more, and its environment may be long in closing
            raise
        finally:
            self._waiting[seat.replica].pop(key, None)
        self._emit(resumed(key, seat.replica, _now()))
        self._report_wait(seat)

    def _report_wait(self, seat: TaskSeat) -> None:
        """What became of the task's KV while it waited, where memory had a price."""
        outcome = self.pools[seat.replica].outcome(seat.key, _now())
        if outcome is not None:
            self._emit(retention(seat.key, seat.replica, outcome, _now()))

    def ended(self, seat: TaskSeat, result: TurnResult, context_tokens: int) -> None:
        pool, now_s = self.pools[seat.replica], _now()
        interrupted = result.finish_reason == "aborted" and context_tokens < seat.wanted_tokens
        if not interrupted:
            stats = self._engines[seat.replica].stats
            pool.rates.observe(
                computed_tokens=context_tokens - len(result.ids) - result.cached_tokens,
                new_tokens=len(result.ids),
                prefill_s=result.prefill_s,
                decode_s=result.decode_s,
                running=stats.running,
                prefilled_tokens=stats.prefilled_tokens,
                prefilled_s=stats.prefilled_s,
            )
        if len(result.versions):
            seat.newest_version = int(result.versions[-1])
        pool.ended(
            seat.key,
            context_tokens,
            len(result.ids),
            now_s,
            interrupted=interrupted,
            cached_tokens=result.cached_tokens,
        )
        self.apply(seat.replica, pool.pump(now_s))
        self._changed(seat.replica)

    def close(self, seat: TaskSeat, *, finished: bool) -> None:
        self._engines[seat.replica].release(seat.key)
        del self._seats[seat.replica][seat.key]
        pool = self.pools[seat.replica]
        pool.leave(seat.key, finished=finished)
        seat.left(_now() - seat.admitted_s if finished else None)
        self.apply(seat.replica, pool.pump(_now()))
        self._changed(seat.replica)


class TaskSeat:
    """A task's place under continuous task batching."""

    def __init__(self, seats: TaskSeats, key: TaskKey, replica: int, left: Left) -> None:
        self._seats, self.key, self.replica, self.left = seats, key, replica, left
        self.began = False
        self.newest_version = -1
        """Of its newest token."""
        self.wanted_tokens = 0
        """Context of the turn that it last asked for, and all that it may sample."""
        self.admitted_s = _now()
        self._open = True

    @property
    def engine(self) -> Engine:
        return self._seats.engine(self.replica)

    @property
    def priority(self) -> float:
        return self._seats.pools[self.replica].engine_priority(self.key, _now())

    async def enter(
        self,
        context_tokens: int,
        max_new_tokens: int,
        handle: EnvironmentHandle,
        *,
        first_ids: np.ndarray | None = None,
    ) -> None:
        await self._seats.enter(self, context_tokens, max_new_tokens, handle, first_ids)

    def ended(self, result: TurnResult, context_tokens: int) -> None:
        self._seats.ended(self, result, context_tokens)

    def over(self) -> None:
        self._close(finished=True)

    def close(self) -> None:
        self._close(finished=False)

    def _close(self, *, finished: bool) -> None:
        if self._open:
            self._open = False
            self._seats.close(self, finished=finished)


def _now() -> float:
    return asyncio.get_running_loop().time()
