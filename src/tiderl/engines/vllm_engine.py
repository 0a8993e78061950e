"""vLLM behind `EngineCore`: token ids in, token ids with log-probs and weight versions out.

Keeps I4 (the pool's blocks are the budget), I6 (new weights empty the prefix cache; every token carries its version)
and I8 (blocks are reused by the hash of their ids). One engine in the process of its rank, on a CPU and on a GPU alike;
it has not run on a GPU yet. Knows turns and tasks; nothing of trajectories or schedules.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from tiderl.data.errors import ConfigurationError, NumericalFault
from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.settings import EngineSettings
from tiderl.data.spans import span
from tiderl.data.turns import (
    EngineCapabilities,
    EngineStats,
    FinishReason,
    PauseMode,
    Turn,
    TurnFailure,
    TurnResult,
)
from tiderl.engines import vllm_setup
from tiderl.engines.sampling import check_sampling
from tiderl.engines.vllm_pool import PoolUse, pool_use
from tiderl.engines.vllm_turns import VllmTurn, check_turn

NO_VERSION = -1
KV_POLICIES = ("lru", "ctb")
SEED_MASK = 0x7FFF_FFFF_FFFF_FFFF  # vLLM takes a signed number


def build(settings: EngineSettings) -> VllmEngine:
    """The engine of one replica, without weights: it samples nothing before the first `load_weights`."""
    return VllmEngine(settings)


class VllmEngine:
    """`EngineCore` over vLLM's `LLMEngine`.

    The KV pool is `kv_budget_tokens` in whole blocks, rounded up, and one null block that holds nothing; a turn larger
    than `kv_budget_tokens` itself is refused. A turn starts when the blocks of its context are free and gives way to
    more important ones when the pool is full, so `growth_quantile` and `prefill_tokens_beside_decoding` have no part
    here: vLLM mixes prefill and decode in one step by itself.

    `kv_policy` `lru`: vLLM's own scheduler and prefix cache by request; `retain` and `release` have no effect. `ctb`:
    a scheduler that pins tasks' blocks between turns (`vllm_scheduler`).
    """

    def __init__(self, settings: EngineSettings, clock: Callable[[], float] = time.perf_counter) -> None:
        if settings.kv_policy not in KV_POLICIES:
            raise ConfigurationError(
                f"the vLLM engine has no KV policy {settings.kv_policy!r}",
                where="rollout.kv_policy",
                hint=f"use {' or '.join(KV_POLICIES)}",
            )
        self._settings = settings
        self._clock = clock
        vllm_setup.prepare_process(settings.model.device)
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from tiderl.engines import vllm_scheduler, vllm_weights

        vllm_weights.register()
        self._load = vllm_weights.load
        self._tags = vllm_scheduler.tags
        self._sampling_params: Any = SamplingParams
        self._delta = RequestOutputKind.DELTA
        scheduler_cls = vllm_scheduler.scheduler_for(settings)
        self._started = vllm_setup.start(settings, scheduler_cls, vllm_weights.FILE_BACKEND)
        self._llm = self._started.llm
        self._scheduler: Any = self._llm.engine_core.engine_core.scheduler
        self._manager: Any = self._scheduler.kv_cache_manager
        self._manager.record_prefix_cache_stats = self._on_admitted  # vLLM calls it once for each start of a request
        self._pins_tasks = scheduler_cls is not None
        self.capabilities = EngineCapabilities(
            retain=self._pins_tasks,
            offload=False,
            kv_budget_tokens=self._started.pool.tokens,
            kv_block_tokens=self._started.pool.block_tokens,
            max_batch=settings.max_batch,
            shares_prompts=True,
        )
        self._version = NO_VERSION
        self._paused = False
        self._closed = False
        self._live: dict[TaskKey, VllmTurn] = {}  # queued or running, by task
        self._by_request: dict[str, VllmTurn] = {}
        self._by_name: dict[str, VllmTurn] = {}
        self._void: set[str] = set()  # request ids whose KV new weights made void, until they start again
        self._arrivals = 0
        self._step_started_s = 0.0
        self._poisoned = False  # NaN is in some block of the pool
        self._ended: list[TurnResult] = []  # to be returned by the next step
        self._generated_tokens = self._prefilled_tokens = self._cached_tokens = self._preemptions = 0

    # ---- requests

    def add(self, turn: Turn) -> None:
        check_sampling(turn.sampling)
        check_turn(turn, self._live.get(turn.task), self._settings, self._started.vocab_size)
        live = VllmTurn(turn, self._arrivals, self._clock())
        self._arrivals += 1
        if turn.sampling.max_new_tokens == 0:
            self._ended.append(live.result("length", self._clock()))
            return
        task = turn.task
        params = self._sampling_params(
            temperature=turn.sampling.temperature,
            max_tokens=turn.sampling.max_new_tokens,
            stop_token_ids=list(turn.sampling.stop_ids),
            ignore_eos=True,  # the turn names its stop ids itself
            seed=turn.sampling.seed & SEED_MASK,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._delta,
            extra_args=self._tags(str(task), _group_of(task), turn.retain),
        )
        live.name = self._llm.add_request(
            live.request_id,
            {"prompt_token_ids": turn.ids.tolist()},
            params,
            arrival_time=float(live.order),
            priority=-turn.priority,  # vLLM: smaller first, then the earlier arrival
        )
        self._live[task] = self._by_request[live.request_id] = live
        self._by_name[live.name] = live
        if self._pins_tasks:
            self._scheduler.expect_task(str(task), turn.priority)

    def abort(self, task: TaskKey, turn: int) -> TurnResult | None:
        for index, result in enumerate(self._ended):
            if (result.task, result.turn) == (task, turn):
                return self._ended.pop(index)
        live = self._live.get(task)
        if live is None or live.turn.turn != turn:
            return None
        return self._abort([live])[0]

    def _abort(self, lives: Iterable[VllmTurn]) -> list[TurnResult]:
        lives = list(lives)
        self._llm.abort_request([live.request_id for live in lives])
        for live in lives:
            self._forget(live)
        now_s = self._clock()
        return [live.result("aborted", now_s) for live in lives]

    def _forget(self, live: VllmTurn) -> None:
        del self._live[live.turn.task], self._by_request[live.request_id], self._by_name[live.name]
        self._void.discard(live.request_id)

    # ---- one iteration

    def step(self) -> list[TurnResult | TurnFailure]:
        ended: list[TurnResult | TurnFailure] = [*self._ended]
        self._ended.clear()
        if self._live and not self._paused and self._version != NO_VERSION:
            self._step_started_s = self._clock()
            with span("vllm step"):
                outputs = self._llm.step()
            now_s = self._clock()
            for output in outputs:
                live = self._by_request.get(output.request_id)  # None: aborted while its last step was computed
                outcome = None if live is None else self._take(live, output, now_s)
                if outcome is not None:
                    ended.append(outcome)
            if self._poisoned:
                self._clean()
        return ended

    def _take(self, live: VllmTurn, output: Any, now_s: float) -> TurnResult | TurnFailure | None:
        """What a step sampled for a turn; its outcome when the turn ends with it."""
        completion = output.outputs[0]
        logprobs = list(completion.logprobs.logprobs) if completion.logprobs else []
        if not all(map(math.isfinite, logprobs)):  # NaN logits: vLLM samples some token and reports a NaN
            self._poisoned = True
            what = f"logits of {live.where} are not finite (weights version {self._version})"
            return self._fail(live, NumericalFault.reason, what, ended=output.finished)
        if live.turn.sampling.temperature == 0.0:  # all mass on the largest logit
            logprobs = [0.0] * len(logprobs)
        live.append(list(completion.token_ids), logprobs, self._version, now_s)
        self._generated_tokens += len(logprobs)
        if not output.finished:
            return None
        if completion.finish_reason not in ("stop", "length"):
            what = f"vLLM ended {live.where} with {completion.finish_reason!r}"
            return self._fail(live, "infrastructure", what, ended=True)
        self._forget(live)
        reason: FinishReason = "stop" if completion.finish_reason == "stop" else "length"
        return live.result(reason, now_s)

    def _fail(self, live: VllmTurn, reason: str, what: str, *, ended: bool) -> TurnFailure:
        """Ends this turn alone; nothing of its KV is kept."""
        if not ended:
            self._llm.abort_request([live.request_id])
        self._forget(live)
        self.release(live.turn.task)
        return TurnFailure(live.turn.task, live.turn.turn, reason, what)

    def _clean(self) -> None:
        """A failed turn left NaN in its blocks, and vLLM's attention reads a block to its end: 0 times NaN reaches its
        next owner. By now these blocks are free and no longer known, so the whole pool starts empty again."""
        self._poisoned = False
        self._forget_kv()
        for cache in self._llm.model_executor.driver_worker.model_runner.kv_caches:
            cache.zero_()

    def _forget_kv(self) -> None:
        """No block is used again: waiting tasks lose theirs, running turns compute theirs anew."""
        self._void = {live.request_id for live in self._live.values() if live.admissions}
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def _on_admitted(self, request: Any, cached_tokens: int) -> None:
        """vLLM starts a request, the first time or after it lost its blocks. `cached_tokens`: hits in the prefix
        cache."""
        live = self._by_name[request.request_id]
        live.admitted(cached_tokens, self._step_started_s)
        self._prefilled_tokens += request.num_tokens - cached_tokens
        self._cached_tokens += cached_tokens
        if live.request_id in self._void:
            self._void.discard(live.request_id)
        elif live.admissions > 1:
            self._preemptions += 1

    # ---- between steps

    def has_work(self) -> bool:
        """Never blocked on KV: what is running ends or gives way, and pins go before the pool is stuck."""
        return bool(self._ended) or (bool(self._live) and not self._paused and self._version != NO_VERSION)

    def retain(self, task: TaskKey) -> None:
        """The task will come back: keep its blocks after the running turn, or mark them as most recently used."""
        if self._pins_tasks and not self._closed:
            self._scheduler.retain_task(str(task))

    def release(self, task: TaskKey) -> None:
        """Free the task's blocks, the first to be reused; a running turn goes on and frees them when it ends."""
        if self._pins_tasks and not self._closed:
            self._scheduler.release_task(str(task), _group_of(task))

    def offload(self, task: TaskKey) -> None:
        """Has no effect: `capabilities.offload` says so. vLLM's own offload to host memory needs a GPU."""

    def pause(self, mode: PauseMode) -> list[TurnResult]:
        self._paused = True
        return [] if mode == "keep" else self._abort(self._live.values())

    def resume(self) -> None:
        self._paused = False

    def load_weights(self, handle: WeightHandle) -> None:
        """Raises `CheckpointError`, with the old weights and KV still in use, when the file does not fit the model.

        Turns in flight lose their blocks, keep their tokens with their versions, and start again by prefilling both
        under the new weights; their stream of random numbers goes on.
        """
        self._load(self._llm, handle.path, self._started.shapes, handle.version)
        self._version = handle.version
        self._forget_kv()

    def stats(self) -> EngineStats:
        running = 0 if self._closed else len(self._scheduler.running)
        use = PoolUse() if self._closed else pool_use(self._scheduler, self._started.pool, self._live.values())
        return EngineStats(
            version=self._version,
            running=running,
            waiting=len(self._live) - running,
            resident_tokens=use.resident_tokens,
            budget_tokens=self._started.pool.tokens,
            paused=self._paused,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=self._preemptions,
            held_tokens=use.held_tokens,
            evicted_tokens=use.evicted_tokens,
            holders=use.holders,
        )

    def close(self) -> None:
        """Drop every turn and all KV; nothing is returned for them. Idempotent."""
        if self._closed:
            return
        self._abort(list(self._live.values()))
        self._ended.clear()
        self._version = NO_VERSION
        self._closed = True
        vllm_setup.stop(self._started)


def _group_of(task: TaskKey) -> str:
    return f"{task.split}/{task.prompt_id}"
