"""The embedded engine: continuous batching over a Hugging Face model, with task-level KV between turns.

Keeps I4 (a turn starts only when all it may need fits), I6 (KV of another version is never used, every token carries
its version) and I8 (KV is reused only for equal ids). Knows turns and tasks; nothing of trajectories or schedules.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

import numpy as np

from tiderl.data.errors import (
    BudgetError,
    ConfigurationError,
    InvariantViolation,
    MissingExtraError,
    NumericalFault,
    RequestTooLarge,
)
from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.settings import EngineSettings
from tiderl.data.turns import (
    EngineCapabilities,
    EngineStats,
    PauseMode,
    Turn,
    TurnFailure,
    TurnResult,
)

try:
    import torch
except ModuleNotFoundError as missing:
    raise MissingExtraError("torch", "train", where="rollout.engine torch") from missing

from tiderl.engines.hf_model import SlotModel
from tiderl.engines.live_turn import LiveTurn
from tiderl.engines.residency import HeldKv, Residency
from tiderl.engines.sampling import check_sampling, sample

HOLDERS_SHOWN = 8
NO_VERSION = -1


def build(settings: EngineSettings) -> TorchEngine:
    """The engine of one replica, without weights: it samples nothing before the first `load_weights`."""
    return TorchEngine(settings)


class TorchEngine:
    """`EngineCore` over a Qwen3, Qwen2 or Llama model.

    Running turns sit in rows 0… of the slot cache. Rows [0, decoding) need one token a step; the rows behind them, in
    order of admission, still have context to prefill. One step decodes the former and prefills up to
    `prefill_tokens_per_step` padded tokens of the latter, whose first token is sampled in the same step; only a context
    longer than that is cut into chunks.
    """

    capabilities = EngineCapabilities(retain=True, offload=False)

    def __init__(self, settings: EngineSettings, clock: Callable[[], float] = time.perf_counter) -> None:
        if settings.kv_policy != "lru":
            raise ConfigurationError(
                f"the embedded engine has no KV policy {settings.kv_policy!r}",
                where="rollout.kv_policy",
                hint="use lru",
            )
        self._settings = settings
        self._clock = clock
        self._model = SlotModel(settings.model)
        self._cache = self._model.new_cache(settings.max_batch)
        self._residency = Residency(settings.kv_budget_tokens)
        self._version = NO_VERSION
        self._paused = False
        self._live: dict[TaskKey, LiveTurn] = {}  # queued or running, by task
        self._queue: list[tuple[float, int, LiveTurn]] = []  # heap: priority, then arrival; aborted ones are skipped
        self._arrivals = 0
        self._rows: list[LiveTurn] = []
        self._decoding = 0
        self._ended: list[TurnResult] = []  # to be returned by the next step
        self._generated_tokens = self._prefilled_tokens = self._cached_tokens = 0

    # ---- requests

    def add(self, turn: Turn) -> None:
        check_sampling(turn.sampling)
        self._check(turn)
        live = LiveTurn(turn, self._clock())
        if turn.sampling.max_new_tokens == 0:
            self._ended.append(live.result("length", self._clock()))
            return
        self._live[turn.task] = live
        heapq.heappush(self._queue, (-turn.priority, self._arrivals, live))
        self._arrivals += 1

    def _check(self, turn: Turn) -> None:
        where = f"turn {turn.turn} of {turn.task}"
        if len(turn.ids) == 0 or turn.ids.min() < 0 or turn.ids.max() >= self._model.vocab_size:
            raise InvariantViolation(
                f"its {len(turn.ids)} ids are not token ids of a vocabulary of {self._model.vocab_size}",
                where=where,
            )
        if turn.task in self._live:
            raise BudgetError(f"turn {self._live[turn.task].turn.turn} of this task is still running", where=where)
        need = len(turn.ids) + turn.sampling.max_new_tokens
        for limit, name in (
            (self._settings.model.max_context_tokens, "context"),
            (self._settings.kv_budget_tokens, "KV budget"),
        ):
            if need > limit:
                raise RequestTooLarge(
                    f"{len(turn.ids)} context + {turn.sampling.max_new_tokens} new tokens exceed the {name} of {limit}",
                    where=where,
                    hint="shorten the context, or raise rollout.max_context_tokens and rollout.kv_budget_tokens",
                )

    @torch.inference_mode()
    def abort(self, task: TaskKey, turn: int) -> TurnResult | None:
        for index, result in enumerate(self._ended):
            if (result.task, result.turn) == (task, turn):
                return self._ended.pop(index)
        live = self._live.get(task)
        if live is None or live.turn.turn != turn:
            return None
        return self._abort([live])[0]

    def _abort(self, lives: list[LiveTurn]) -> list[TurnResult]:
        now_s = self._clock()
        gone = set(map(id, lives))
        self._leave([row for row, live in enumerate(self._rows) if id(live) in gone])
        for live in lives:
            self._live.pop(live.turn.task, None)
        return [live.result("aborted", now_s) for live in lives]

    # ---- one iteration

    @torch.inference_mode()
    def step(self) -> list[TurnResult | TurnFailure]:
        ended: list[TurnResult | TurnFailure] = [*self._ended]
        self._ended.clear()
        if self._paused or self._version == NO_VERSION:
            return ended
        self._admit()
        if not self._rows:
            return ended
        logits = []
        decoding = self._decoding
        if decoding:
            logits.append(self._forward(0, [1] * decoding))
        plan = self._prefill_plan()
        if plan:
            logits.append(self._forward(decoding, plan))
            self._prefilled_tokens += sum(plan)
        computed = self._rows[: decoding + len(plan)]
        self._decoding = sum(live.pending == 0 for live in computed)  # all but a chunked one, which is the last
        return ended + self._sample(torch.cat(logits), computed)

    def _admit(self) -> None:
        """Start queued turns in order while rows and budget allow; the first that does not fit holds back the rest."""
        now_s = self._clock()
        while self._queue and len(self._rows) < self._settings.max_batch:
            live = self._queue[0][2]
            task = live.turn.task
            if self._live.get(task) is live:
                if not self._residency.fits(live.need_tokens):
                    return
                held = self._residency.reserve(task, live.need_tokens)
                row = len(self._rows)
                self._cache.ensure(row + 1, live.need_tokens)
                if held is not None:
                    # The last id is always computed: its logits are what the first token is sampled from.
                    reused = min(held.usable_tokens(live.turn.ids, self._version), live.context_tokens - 1)
                    self._cache.copy_in(row, held.kv, reused)
                    live.filled = live.cached_tokens = reused
                    self._cached_tokens += reused
                live.admitted(now_s)
                self._rows.append(live)
            heapq.heappop(self._queue)

    def _prefill_plan(self) -> list[int]:
        """How many tokens each of the next rows prefills now. Only the first of them can be a chunk."""
        limit = self._settings.prefill_tokens_per_step
        plan: list[int] = []
        width = 0
        for live in self._rows[self._decoding :]:
            width = max(width, live.pending)
            if plan and (len(plan) + 1) * width > limit:
                break
            plan.append(min(live.pending, limit))
        return plan

    def _forward(self, first_row: int, widths: list[int]) -> torch.Tensor:
        """Compute the next `widths[i]` tokens of rows `first_row + i`: the logits after the last, float32 [rows, V]."""
        lives = self._rows[first_row : first_row + len(widths)]
        starts = np.array([live.filled for live in lives], dtype=np.int64)
        lasts = starts + np.array(widths, dtype=np.int64) - 1
        positions = np.minimum(starts[:, None] + np.arange(max(widths)), lasts[:, None])
        ids = np.stack([live.ids[at] for live, at in zip(lives, positions, strict=True)]).astype(np.int64)
        logits = self._model.forward(
            self._cache, first_row, torch.from_numpy(ids), torch.from_numpy(positions), int(lasts.max())
        )
        for live, width in zip(lives, widths, strict=True):
            live.filled += width
        return logits

    def _sample(self, logits: torch.Tensor, lives: list[LiveTurn]) -> list[TurnResult | TurnFailure]:
        """One token for each of the first rows (`lives`), and the outcome of those that end with it.

        A row with context still to prefill gets no token, but fails here already when its logits are not finite: so no
        NaN outlives its step in the cache.
        """
        temperatures = [live.turn.sampling.temperature for live in lives]
        draws = sample(logits, temperatures, [0.0 if live.pending else live.next_uniform() for live in lives])
        now_s = self._clock()
        outcomes: list[TurnResult | TurnFailure] = []
        leaving: list[int] = []
        for row, (live, draw) in enumerate(zip(lives, draws, strict=True)):
            if draw is None:
                outcomes.append(self._numerical_failure(live))
                self._cache.clear(row)
                live.retain = False
                leaving.append(row)
                continue
            if live.pending:
                continue
            reason = live.append(*draw, self._version, now_s)
            self._generated_tokens += 1
            if reason is not None:
                outcomes.append(live.result(reason, now_s))
                leaving.append(row)
        self._leave(leaving)
        for outcome in outcomes:
            del self._live[outcome.task]
        return outcomes

    def _numerical_failure(self, live: LiveTurn) -> TurnFailure:
        what = f"logits of turn {live.turn.turn} of {live.turn.task} are not finite (weights version {self._version})"
        return TurnFailure(live.turn.task, live.turn.turn, NumericalFault.reason, what)

    def _leave(self, rows: list[int]) -> None:
        """Free these rows and their reservations, keep their KV for the next turn where wanted, close the gaps."""
        for row in rows:
            live = self._rows[row]
            entry = None
            if live.retain and live.filled:
                kv = self._cache.copy_out(row, live.filled)
                entry = HeldKv(live.ids[: live.filled].copy(), self._version, kv)
            self._residency.settle(live.turn.task, entry)
        gone = set(rows)
        staying = [row for row in range(self._decoding) if row not in gone]
        order = staying_in_place(staying) + [
            row for row in range(self._decoding, len(self._rows)) if row not in gone
        ]  # prefilling rows keep their order, so that a chunked one stays first
        for target, source in enumerate(order):
            if source != target:
                self._cache.move(source, target, self._rows[source].filled)
        self._rows = [self._rows[source] for source in order]
        self._decoding = len(staying)

    # ---- between steps

    def has_work(self) -> bool:
        return bool(self._ended) or (bool(self._live) and not self._paused and self._version != NO_VERSION)

    def retain(self, task: TaskKey) -> None:
        """The task will come back: keep its KV after the running turn, or mark it as most recently used."""
        if task in self._live:
            self._live[task].retain = True
        self._residency.touch(task)

    def release(self, task: TaskKey) -> None:
        """Drop the task's KV; a running turn goes on and drops it when it ends."""
        if task in self._live:
            self._live[task].retain = False
        self._residency.drop(task)

    def offload(self, task: TaskKey) -> None:
        """Not supported, and declared so in `capabilities`: the KV stays where it is."""

    @torch.inference_mode()
    def pause(self, mode: PauseMode) -> list[TurnResult]:
        self._paused = True
        if mode == "keep":
            return []
        self._queue.clear()
        return self._abort(list(self._live.values()))

    def resume(self) -> None:
        self._paused = False

    @torch.inference_mode()
    def load_weights(self, handle: WeightHandle) -> None:
        """Raises `CheckpointError`, with the old weights and KV still in use, when the file does not fit the model."""
        self._model.load(handle.path)
        self._version = handle.version
        self._residency.drop_all_held()
        for live in self._rows:
            live.filled = 0
        self._decoding = 0

    def stats(self) -> EngineStats:
        resident = self._residency.held()
        for live in self._rows:
            if live.filled:
                resident[live.turn.task] = live.filled
        largest = heapq.nlargest(HOLDERS_SHOWN, resident, key=resident.__getitem__)
        return EngineStats(
            version=self._version,
            running=len(self._rows),
            waiting=len(self._live) - len(self._rows),
            resident_tokens=sum(resident.values()),
            budget_tokens=self._settings.kv_budget_tokens,
            paused=self._paused,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            cached_tokens=self._cached_tokens,
            holders=tuple(str(task) for task in largest),
        )

    def close(self) -> None:
        """Drop every turn and all KV; nothing is returned for them. Idempotent."""
        self._live.clear()
        self._queue.clear()
        self._ended.clear()
        self._rows.clear()
        self._decoding = 0
        self._residency = Residency(self._settings.kv_budget_tokens)
        self._cache = self._model.new_cache(self._settings.max_batch)
        self._version = NO_VERSION


def staying_in_place(rows: list[int]) -> list[int]:
    """Order `rows` (ascending) so that every row below their count keeps its place and the others fill the gaps.

    >>> staying_in_place([0, 2, 4, 5])
    [0, 5, 2, 4]
    """
    count = len(rows)
    inside = {row for row in rows if row < count}
    outside = [row for row in rows if row >= count]
    return [row if row in inside else outside.pop() for row in range(count)]
