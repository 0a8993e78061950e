"""The embedded engine: continuous batching over a Hugging Face model, with task-level KV between turns.

Keeps I4 (`admission` decides who may start or grow), I6 (KV of another version is never used, every token carries
its version) and I8 (KV is reused only for equal ids). Knows turns and tasks; nothing of trajectories or schedules.
"""

from __future__ import annotations

import heapq
import math
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
from tiderl.data.spans import span
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

from tiderl.engines.active_rows import ActiveRows
from tiderl.engines.admission import Admission
from tiderl.engines.hf_model import SlotModel
from tiderl.engines.host_pool import HostPool, default_budget_tokens, measured_reload_s
from tiderl.engines.live_turn import LiveTurn
from tiderl.engines.residency import GroupKey, HeldKv, Owner, Residency, group_of
from tiderl.engines.reuse import Sources, prefix_to_keep
from tiderl.engines.sampling import check_sampling, sample

HOLDERS_SHOWN = 8
NO_VERSION = -1


def build(settings: EngineSettings) -> TorchEngine:
    """The engine of one replica, without weights: it samples nothing before the first `load_weights`."""
    return TorchEngine(settings)


class TorchEngine:
    """`EngineCore` over a Qwen3, Qwen2 or Llama model.

    One step decodes a token for every row whose context is computed, and prefills up to `prefill_tokens_per_step`
    padded tokens of the rows behind them (fewer beside decoding rows), whose first token is sampled in the same step;
    only a context longer than that is cut into chunks.

    A row is filled when its prefill begins: by what the task held, or by a copy of what a member of its group has of
    the same ids. Members that come together wait while the first of them prefills the prompt.
    """

    def __init__(self, settings: EngineSettings, clock: Callable[[], float] = time.perf_counter) -> None:
        if not 0.0 < settings.growth_quantile <= 1.0:
            raise ConfigurationError(f"growth_quantile {settings.growth_quantile} is not in (0, 1]", where="rollout")
        self._settings = settings
        self._residency = Residency(settings.kv_budget_tokens, settings.kv_policy)
        self._clock = clock
        self._model = SlotModel(settings.model)
        self._rows = ActiveRows(self._model.new_cache(settings.max_batch))
        host_tokens = settings.host_kv_budget_tokens
        if host_tokens is None:
            host_tokens = default_budget_tokens(self._model.device.type, settings.kv_budget_tokens)
        self._host = HostPool(host_tokens)
        token_bytes = self._rows.cache.token_bytes
        self._reload_token_s = measured_reload_s(self._model.device, token_bytes) if host_tokens else math.inf
        self.capabilities = EngineCapabilities(
            retain=True,
            offload=host_tokens > 0,
            kv_budget_tokens=settings.kv_budget_tokens,
            max_batch=settings.max_batch,
            reload_token_s=self._reload_token_s if host_tokens else None,
            host_kv_tokens=host_tokens,
        )
        self._admission = Admission(self._residency, settings.growth_quantile)
        self._version = NO_VERSION
        self._paused = False
        self._live: dict[TaskKey, LiveTurn] = {}  # queued or running, by task
        self._arrivals = 0
        self._ended: list[TurnResult] = []  # to be returned by the next step
        self._generated_tokens = self._prefilled_tokens = 0
        self._prefilled_s = 0.0

    # ---- requests

    def add(self, turn: Turn) -> None:
        check_sampling(turn.sampling)
        self._check(turn)
        live = LiveTurn(turn, self._arrivals, self._clock())
        self._arrivals += 1
        if turn.sampling.max_new_tokens == 0:
            self._ended.append(live.result("length", self._clock()))
            return
        self._live[turn.task] = live
        self._admission.push(live)
        if self._residency.by_task:  # what is asked for again will be used before what only may be
            self._residency.touch(turn.task, turn.priority)

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
        self._leave(self._rows.numbers(lives))
        for live in lives:
            self._live.pop(live.turn.task, None)
            self._admission.withdraw(live)
        self._drop_unwanted_prefixes()
        return [live.result("aborted", now_s) for live in lives]

    # ---- one iteration

    @torch.inference_mode()
    def step(self) -> list[TurnResult | TurnFailure]:
        ended: list[TurnResult | TurnFailure] = [*self._ended]
        self._ended.clear()
        if self._paused or self._version == NO_VERSION:
            return ended
        with span("admit"):
            self._admit()
        if not self._rows.lives:
            return ended
        logits = []
        decoding = self._rows.decoding
        if decoding:
            with span("decode"):
                logits.append(self._forward(0, [1] * decoding))
        with span("fill rows"):
            plan = self._fill_rows()
        if plan:
            began_s = self._clock()
            with span("prefill"):
                logits.append(self._forward(decoding, plan))
            if self._model.device.type == "cpu":  # elsewhere it has only been started
                self._prefilled_s += self._clock() - began_s
            self._prefilled_tokens += sum(plan)
            self._drop_unwanted_prefixes()
        computed = self._rows.advanced(len(plan))
        with span("sample"):
            return ended + self._sample(torch.cat(logits), computed)

    def _admit(self) -> None:
        """Let running turns grow, then start queued ones with what room is left."""
        preempted = self._admission.make_room(self._rows.lives)
        if preempted:
            rows = self._rows.numbers(preempted)
            for row in rows:
                live = self._rows.lives[row]
                if live.filled and self._spills(live.turn.task, live.filled):
                    self._host.put(live.turn.task, self._rows.computed_kv(row, self._version))
            self._rows.vacate(rows)
            for live in preempted:
                live.forget_kv()
        started = self._admission.admit(self._settings.max_batch - len(self._rows.lives), self._clock())
        for live in started:
            if live.own_kv is not None:  # a fork leaves the rest of it behind
                usable = live.own_kv.usable_tokens(live.known_ids, self._version)
                live.own_kv = self._rows.shortened(live.own_kv, usable)
        self._rows.append(started)
        for task, entry in self._residency.take_evicted():
            if self._spills(task, entry.tokens):
                self._host.put(task, entry)
            self._keep_prefix(group_of(task), entry, self._rows.lives)

    def _spills(self, task: TaskKey, tokens: int) -> bool:
        """Under `ctb`, what pressure takes goes to host memory, where that has room and loading is the faster way."""
        slow = self._prefilled_tokens and self._reload_token_s >= self._prefilled_s / self._prefilled_tokens
        return self._residency.by_task and not slow and self._host.has_room_for(task, tokens)

    def _fill_rows(self) -> list[int]:
        """How many tokens each of the rows behind the decoding ones prefills in this step."""
        limit = self._settings.prefill_tokens_per_step
        if self._rows.decoding:
            limit = min(limit, self._settings.prefill_tokens_beside_decoding)
        decoding = self._rows.lives[: self._rows.decoding]
        if len(decoding) == len(self._rows.lives):
            return []
        widths = self._rows.fill(limit, self._sources(decoding))
        for live in self._rows.lives[len(decoding) : len(decoding) + len(widths)]:
            self._host.drop(live.turn.task)  # it is in the row now
        return widths

    def _sources(self, rows: list[LiveTurn]) -> Sources:
        """What can be copied from: held KV, and these first rows."""
        sources = Sources(self._residency, self._host, self._version)
        for row, live in enumerate(rows):
            if live.filled:
                sources.add_row(row, live, prefills=False)
        return sources

    def _forward(self, first_row: int, widths: list[int]) -> torch.Tensor:
        """Compute the next `widths[i]` tokens of rows `first_row + i`: the logits after the last, float32 [rows, V]."""
        lives = self._rows.lives[first_row : first_row + len(widths)]
        starts = np.array([live.filled for live in lives], dtype=np.int64)
        lasts = starts + np.array(widths, dtype=np.int64) - 1
        positions = np.minimum(starts[:, None] + np.arange(max(widths)), lasts[:, None])
        if positions.shape[1] == 1:  # of every step: the general way costs a decoding row ten times as much
            ids = np.array([live.ids[live.filled] for live in lives], dtype=np.int64)[:, None]
        else:
            ids = np.stack([live.ids[at] for live, at in zip(lives, positions, strict=True)]).astype(np.int64)
        logits = self._model.forward(
            self._rows.cache, first_row, torch.from_numpy(ids), torch.from_numpy(positions), int(lasts.max())
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
        leaving: set[int] = set()
        for row, (live, draw) in enumerate(zip(lives, draws, strict=True)):
            if draw is None:
                outcomes.append(self._numerical_failure(live))
                self._rows.cache.clear(row)
                live.forget_kv()
                leaving.add(row)
                continue
            if live.pending:
                continue
            reason = live.append(*draw, self._version, now_s)
            self._generated_tokens += 1
            if reason is not None:
                self._admission.ended(live)
                outcomes.append(live.result(reason, now_s))
                leaving.add(row)
        for outcome in outcomes:
            del self._live[outcome.task]
        with span("retire"):
            self._leave(leaving)
        return outcomes

    def _numerical_failure(self, live: LiveTurn) -> TurnFailure:
        what = f"logits of turn {live.turn.turn} of {live.turn.task} are not finite (weights version {self._version})"
        return TurnFailure(live.turn.task, live.turn.turn, NumericalFault.reason, what)

    def _leave(self, gone: set[int]) -> None:
        """Free these rows and their reservations, and keep their KV for who will want it: the task, or its group."""
        staying = [live for row, live in enumerate(self._rows.lives) if row not in gone]
        for row in sorted(gone):
            live = self._rows.lives[row]
            entry = live.own_kv  # it ends before its row was computed
            if live.filled and (live.retain or self._unstarted(live.group)):
                entry = self._rows.computed_kv(row, self._version)
            self._residency.settle(live.turn.task, entry if live.retain else None, live.turn.priority)
            if entry is not None and not live.retain:
                self._keep_prefix(live.group, entry, staying)
        self._rows.vacate(gone)

    # ---- KV that outlives its turn

    def _unstarted(self, group: GroupKey) -> list[LiveTurn]:
        return [live for live in self._live.values() if live.group == group and not live.filled]

    def _keep_prefix(self, group: GroupKey, entry: HeldKv, rows: list[LiveTurn]) -> None:
        """The last copy of a group's prompt would go while members have yet to start: keep that much of it, where it
        fits without any eviction."""
        tokens = prefix_to_keep(entry, self._unstarted(group), self._sources(rows))
        if 0 < tokens <= self._residency.free_tokens:
            self._residency.keep_prefix(group, self._rows.shortened(entry, tokens))

    def _drop_unwanted_prefixes(self) -> None:
        for group in self._residency.prefixes():
            if not self._unstarted(group):
                self._residency.drop(group)

    # ---- between steps

    def has_work(self) -> bool:
        return bool(self._ended) or (bool(self._live) and not self._paused and self._version != NO_VERSION)

    def retain(self, task: TaskKey) -> None:
        """The task will come back: keep its KV after the running turn, or (not under `lru`) mark it as just used."""
        if task in self._live:
            self._live[task].retain = True
        if self._residency.by_task:
            self._residency.touch(task)

    @torch.inference_mode()
    def release(self, task: TaskKey) -> None:
        """Drop the task's KV; a running turn goes on and drops it when it ends."""
        if task in self._live:
            self._live[task].retain = False
        self._host.drop(task)
        entry = self._residency.drop(task)
        if entry is not None:
            self._keep_prefix(group_of(task), entry, self._rows.lives)
        self._drop_unwanted_prefixes()

    @torch.inference_mode()
    def offload(self, task: TaskKey) -> None:
        """Move a waiting task's KV to host memory, until its next turn; without room there it stays where it is."""
        if task in self._live or not self._host.has_room_for(task, self._residency.held_tokens_of(task)):
            return
        entry = self._residency.drop(task)
        if entry is not None:
            self._host.put(task, entry)
            self._keep_prefix(group_of(task), entry, self._rows.lives)

    @torch.inference_mode()
    def pause(self, mode: PauseMode) -> list[TurnResult]:
        self._paused = True
        if mode == "keep":
            return []
        return self._abort(list(self._live.values()))

    def resume(self) -> None:
        self._paused = False

    @torch.inference_mode()
    def load_weights(self, handle: WeightHandle) -> None:
        """Raises `CheckpointError`, with the old weights and KV still in use, when the file does not fit the model."""
        self._model.load(handle.path)
        self._version = handle.version
        self._residency.drop_all_held()
        self._host.clear()
        self._rows.rewind()

    def stats(self) -> EngineStats:
        resident: dict[Owner, int] = self._residency.held()
        for live in self._rows.lives:
            tokens = live.own_kv.tokens if live.own_kv is not None else live.filled
            if tokens:
                resident[live.turn.task] = tokens
        largest = heapq.nlargest(HOLDERS_SHOWN, resident, key=resident.__getitem__)
        return EngineStats(
            version=self._version,
            running=len(self._rows.lives),
            waiting=len(self._live) - len(self._rows.lives),
            resident_tokens=sum(resident.values()),
            budget_tokens=self._settings.kv_budget_tokens,
            paused=self._paused,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            prefilled_s=self._prefilled_s,
            cached_tokens=self._rows.cached_tokens,
            preemptions=self._admission.preemptions,
            offloaded_tokens=self._host.tokens,
            held_tokens=self._residency.held_tokens,
            evicted_tokens=self._residency.evicted_tokens,
            holders=tuple(str(owner) for owner in largest),
        )

    def close(self) -> None:
        """Drop every turn and all KV; nothing is returned for them. Idempotent."""
        self._live.clear()
        self._ended.clear()
        self._rows = ActiveRows(self._model.new_cache(self._settings.max_batch))
        self._host.clear()
        self._residency = Residency(self._settings.kv_budget_tokens, self._settings.kv_policy)
        self._admission = Admission(self._residency, self._settings.growth_quantile)
        self._version = NO_VERSION
