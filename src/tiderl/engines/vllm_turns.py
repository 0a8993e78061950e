"""One turn inside the vLLM engine, from `add` to its result: whether it may come in, what came back so far, its times.

Tokens keep the weight version that made them (I6). Knows nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiderl.data.errors import BudgetError, ConfigurationError, InvariantViolation, RequestTooLarge
from tiderl.data.settings import EngineSettings
from tiderl.data.turns import FinishReason, Turn, TurnResult

UNSET_S = -1.0
LEAST_TEMPERATURE = 0.01
"""vLLM raises a smaller one to this, 0 excepted: its log-probs would be of another distribution than was asked for."""


def check_turn(turn: Turn, running: VllmTurn | None, settings: EngineSettings, vocab_size: int) -> None:
    """`running`: the task's turn that has not ended. Raises `InvariantViolation`, `BudgetError`, `RequestTooLarge`, and
    `ConfigurationError` for a temperature that vLLM does not sample at."""
    where = f"turn {turn.turn} of {turn.task}"
    if 0 < turn.sampling.temperature < LEAST_TEMPERATURE:
        raise ConfigurationError(
            f"vLLM does not sample at temperature {turn.sampling.temperature}: give 0, or {LEAST_TEMPERATURE} and more",
            where="rollout.engine vllm",
        )
    if len(turn.ids) == 0 or turn.ids.min() < 0 or turn.ids.max() >= vocab_size:
        raise InvariantViolation(
            f"its {len(turn.ids)} ids are not token ids of a vocabulary of {vocab_size}", where=where
        )
    if running is not None:
        raise BudgetError(f"turn {running.turn.turn} of this task is still running", where=where)
    need = len(turn.ids) + turn.sampling.max_new_tokens
    for limit, name in ((settings.model.max_context_tokens, "context"), (settings.kv_budget_tokens, "KV budget")):
        if need > limit:
            raise RequestTooLarge(
                f"{len(turn.ids)} context + {turn.sampling.max_new_tokens} new tokens exceed the {name} of {limit}",
                where=where,
                hint="shorten the context, or raise rollout.max_context_tokens and rollout.kv_budget_tokens",
            )


class VllmTurn:
    """`request_id` names the turn, `name` is what vLLM's scheduler calls it once it was added, `order` its place among
    all that arrived."""

    def __init__(self, turn: Turn, order: int, now_s: float) -> None:
        self.turn = turn
        self.order = order
        self.name = ""
        self.request_id = f"{turn.task}#{turn.turn}@{order}"
        self.cached_tokens = 0
        self.admissions = 0  # the first one, and one after each preemption
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._added_s = now_s
        self._admitted_s = self._first_token_s = self._last_token_s = UNSET_S
        self._recomputes = False
        self._recompute_s = 0.0

    @property
    def where(self) -> str:
        """For people."""
        return f"turn {self.turn.turn} of {self.turn.task}"

    def admitted(self, cached_tokens: int, now_s: float) -> None:
        """It has blocks, and `cached_tokens` of its context need no prefill."""
        self.admissions += 1
        if self._admitted_s == UNSET_S:
            self._admitted_s = now_s
            self.cached_tokens = min(cached_tokens, len(self.turn.ids))
        else:
            self._recomputes = bool(self._ids)

    def append(self, ids: Sequence[int], logprobs: Sequence[float], version: int, now_s: float) -> None:
        if not self._ids:
            self._first_token_s = now_s
        elif self._recomputes:
            self._recompute_s += now_s - self._last_token_s
        self._recomputes = False
        self._last_token_s = now_s
        self._ids += ids
        self._logprobs += logprobs
        self._versions += [version] * len(ids)

    def result(self, reason: FinishReason, now_s: float) -> TurnResult:
        admitted_s = now_s if self._admitted_s == UNSET_S else self._admitted_s
        first_token_s = now_s if self._first_token_s == UNSET_S else self._first_token_s
        return TurnResult(
            task=self.turn.task,
            turn=self.turn.turn,
            ids=np.array(self._ids, dtype=np.int32),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=np.array(self._versions, dtype=np.int32),
            finish_reason=reason,
            cached_tokens=self.cached_tokens,
            queued_s=admitted_s - self._added_s,
            prefill_s=first_token_s - admitted_s,
            decode_s=now_s - first_token_s,
            recompute_s=self._recompute_s,
            ended_s=now_s,
        )
