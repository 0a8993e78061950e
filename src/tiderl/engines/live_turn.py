"""One turn inside the engine, from `add` to its result: its ids, how many of them have KV, and its times.

Tokens keep the weight version that made them (I6), and its place in the order is fixed: preempted, it comes back to
the same place. Knows no budgets or tensors.
"""

from __future__ import annotations

import numpy as np

from tiderl.data.turns import FinishReason, Turn, TurnResult
from tiderl.engines.residency import HeldKv, group_of
from tiderl.engines.sampling import Uniforms


class LiveTurn:
    """`ids[:length]` is the context and what was sampled so far; `ids[:filled]` has KV in the turn's row."""

    def __init__(self, turn: Turn, arrival: int, now_s: float) -> None:
        self.turn = turn
        self.group = group_of(turn.task)
        self.order = (-turn.priority, arrival)  # smaller is more senior: it starts first and gives way last
        self.retain = turn.retain
        self.context_tokens = len(turn.ids)
        self.need_tokens = self.context_tokens + turn.sampling.max_new_tokens
        self.ids = np.empty(self.need_tokens, dtype=np.int32)
        self.ids[: self.context_tokens] = turn.ids
        self.length = self.context_tokens
        self.filled = 0
        self.reserved_tokens = 0  # of the KV budget, while it runs
        self.own_kv: HeldKv | None = None  # what its task held, from admission until the row is first computed
        self.preemptions = 0
        self.cached_tokens = 0  # when its row was first computed; recomputing later does not change it
        self._activated = False
        self._uniforms = Uniforms(turn.sampling.seed)
        self._stop_ids = frozenset(turn.sampling.stop_ids)
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._added_s = now_s
        self._admitted_s = self._first_token_s = self._last_token_s = -1.0
        self._void = False  # tokens were sampled, and their KV has to be computed again
        self._recompute_s = 0.0

    @property
    def known_ids(self) -> np.ndarray:
        """int32 [length]: a view, for as long as nothing is appended."""
        return self.ids[: self.length]

    @property
    def pending(self) -> int:
        """Tokens that the next forward of this turn must still compute: 1 while decoding."""
        return self.length - self.filled

    @property
    def sampled_tokens(self) -> int:
        return self.length - self.context_tokens

    def next_uniform(self) -> float:
        return self._uniforms.next()

    def admitted(self, own_kv: HeldKv | None, reserved_tokens: int, now_s: float) -> None:
        self.own_kv, self.reserved_tokens = own_kv, reserved_tokens
        if self._admitted_s < 0:
            self._admitted_s = now_s

    def activated(self, reused_tokens: int) -> None:
        """Its row starts with this many positions that were copied."""
        self.filled = reused_tokens
        self.own_kv = None
        if not self._activated:
            self._activated = True
            self.cached_tokens = reused_tokens

    def forget_kv(self) -> None:
        """All of its context is to be computed again; what was sampled stays."""
        self.filled = 0
        self.own_kv = None
        self._void = bool(self._logprobs)

    def append(self, token: int, logprob: float, version: int, now_s: float) -> FinishReason | None:
        """Take a sampled token; the reason when it is the last one."""
        if not self._logprobs:
            self._first_token_s = now_s
        if self._void:
            self._recompute_s += now_s - self._last_token_s
            self._void = False
        self._last_token_s = now_s
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
            recompute_s=self._recompute_s,
            ended_s=now_s,
        )
