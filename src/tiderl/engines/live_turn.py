"""One turn inside the engine, from `add` to its result: its ids, how many of them have KV, and its times.

Tokens keep the weight version that made them (I6). Knows no rows, budgets or tensors.
"""

from __future__ import annotations

import numpy as np

from tiderl.data.turns import FinishReason, Turn, TurnResult
from tiderl.engines.sampling import Uniforms


class LiveTurn:
    """`ids[:length]` is the context and what was sampled so far; `ids[:filled]` has KV in the turn's row."""

    def __init__(self, turn: Turn, now_s: float) -> None:
        self.turn = turn
        self.retain = turn.retain
        self.context_tokens = len(turn.ids)
        self.need_tokens = self.context_tokens + turn.sampling.max_new_tokens
        self.ids = np.empty(self.need_tokens, dtype=np.int32)
        self.ids[: self.context_tokens] = turn.ids
        self.length = self.context_tokens
        self.filled = 0
        self.cached_tokens = 0
        self._uniforms = Uniforms(turn.sampling.seed)
        self._stop_ids = frozenset(turn.sampling.stop_ids)
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._added_s = now_s
        self._admitted_s = self._first_token_s = -1.0

    @property
    def pending(self) -> int:
        """Tokens that the next forward of this turn must still compute: 1 while decoding."""
        return self.length - self.filled

    def next_uniform(self) -> float:
        return self._uniforms.next()

    def admitted(self, now_s: float) -> None:
        self._admitted_s = now_s

    def append(self, token: int, logprob: float, version: int, now_s: float) -> FinishReason | None:
        """Take a sampled token; the reason when it is the last one."""
        if not self._logprobs:
            self._first_token_s = now_s
        self.ids[self.length] = token
        self.length += 1
        self._logprobs.append(logprob)
        self._versions.append(version)
        if token in self._stop_ids:
            return "stop"
        return "length" if self.length == self.need_tokens else None

    def result(self, reason: FinishReason, now_s: float) -> TurnResult:
        admitted_s = now_s if self._admitted_s < 0 else self._admitted_s
        first_token_s = now_s if self._first_token_s < 0 else self._first_token_s
        return TurnResult(
            task=self.turn.task,
            turn=self.turn.turn,
            ids=self.ids[self.context_tokens : self.length].copy(),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=np.array(self._versions, dtype=np.int32),
            finish_reason=reason,
            cached_tokens=self.cached_tokens,
            queued_s=admitted_s - self._added_s,
            prefill_s=first_token_s - admitted_s,
            decode_s=now_s - first_token_s,
        )
