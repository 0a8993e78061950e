"""One turn inside a simulated engine, and the result it becomes.

Arrays have stride 0 wherever they can: a turn of 10,000 tokens costs some hundred bytes. Ids are 0 and log-probs 0 (the
certain outcome): in virtual time only lengths and versions have a meaning.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache

import numpy as np

from tiderl.data.records import TaskKey
from tiderl.data.turns import FinishReason, Turn, TurnResult
from tiderl.sim.kv import Prefix

# Longer than any context; slices of these are views without memory.
_LONGEST = 1 << 24
_IDS = np.broadcast_to(np.int32(0), (_LONGEST,))
_LOGPROBS = np.broadcast_to(np.float32(0.0), (_LONGEST,))


@lru_cache(maxsize=64)
def _versions(version: int) -> np.ndarray:
    return np.broadcast_to(np.int32(version), (_LONGEST,))


class Request:
    """A turn from `generate` to its result. `sampled` counts whole iterations up to `settled_at` only."""

    __slots__ = (
        "admitted_s",
        "arrived_s",
        "blocks",
        "cached_tokens",
        "computed",
        "decoding",
        "finish_reason",
        "finishes_at",
        "first_token_s",
        "future",
        "mine",
        "number",
        "over",
        "phase",
        "prefill_left",
        "prefixes",
        "ready_s",
        "recompute_s",
        "released",
        "sampled",
        "seat",
        "settled_at",
        "spans",
        "target",
        "turn",
        "void_s",
    )

    def __init__(
        self,
        turn: Turn,
        number: int,
        target: int,
        finish_reason: FinishReason,
        arrived_s: float,
        future: asyncio.Future[TurnResult],
    ) -> None:
        self.turn, self.number, self.future = turn, number, future
        self.target, self.finish_reason = (
            target,
            finish_reason,
        )  # tokens it samples if nobody interferes, and why it ends
        self.arrived_s = arrived_s
        self.admitted_s = self.first_token_s = -1.0  # of the first time, where it was preempted
        self.cached_tokens = -1  # of the first admission
        self.void_s = 0.0  # since when what it sampled has no KV, while it is computed again
        self.recompute_s = 0.0
        self.prefixes: tuple[Prefix, ...] = ()
        self.mine: list[Prefix] = []  # of these, what it computes itself
        self.seat = -1  # order of admission; -1 while it waits
        self.prefill_left = 0  # tokens of context still to compute
        self.ready_s = 0.0  # when its KV from host memory is there, so that the rest can be computed
        self.computed = 0  # tokens prefilled since it was admitted
        self.blocks = 0  # taken for it alone, growth not counted
        self.phase = 0  # while decoding: positions modulo the block size, less iterations
        self.decoding = False
        self.over = False  # it left the batch
        self.released = False  # its task is over: keep nothing of it
        self.sampled = 0
        self.settled_at = 0  # the engine's iteration count when `sampled` was right
        self.finishes_at = 0  # the iteration count at which it reaches `target`
        self.spans: list[tuple[int, int]] = []  # (version, tokens) of the versions before the present one

    @property
    def task(self) -> TaskKey:
        return self.turn.task

    @property
    def known_tokens(self) -> int:
        """Context and sampled tokens; the last sampled one has no KV yet."""
        return len(self.turn.ids) + self.sampled

    @property
    def kv_tokens(self) -> int:
        """Positions of its context that are computed or cached; 0 while it waits."""
        if self.seat < 0:
            return 0
        return self.known_tokens - (1 if self.decoding else self.prefill_left)

    def catch_up(self, iterations: int) -> None:
        """Count the tokens of the iterations that ran since it was last right."""
        if self.decoding:
            self.sampled += iterations - self.settled_at
            self.settled_at = iterations

    def close_span(self, version: int) -> None:
        """What was sampled since the last span was made by `version`."""
        made = self.sampled - sum(tokens for _, tokens in self.spans)
        if made:
            self.spans.append((version, made))

    def result(self, finish_reason: FinishReason, version: int, now_s: float) -> TurnResult:
        """The finished or aborted turn; call `catch_up` first."""
        self.close_span(version)
        count = self.sampled
        if len(self.spans) > 1:
            versions = np.repeat(
                np.array([made_by for made_by, _ in self.spans], np.int32),
                [tokens for _, tokens in self.spans],
            )
        else:
            versions = _versions(version if not self.spans else self.spans[0][0])[:count]
        admitted_s = self.admitted_s if self.admitted_s >= 0 else now_s
        first_token_s = self.first_token_s if self.first_token_s >= 0 else now_s
        return TurnResult(
            task=self.task,
            turn=self.turn.turn,
            ids=_IDS[:count],
            logprobs=_LOGPROBS[:count],
            versions=versions,
            finish_reason=finish_reason,
            cached_tokens=max(0, self.cached_tokens),
            queued_s=admitted_s - self.arrived_s,
            prefill_s=first_token_s - admitted_s,
            decode_s=now_s - first_token_s,
            recompute_s=self.recompute_s,
            ended_s=now_s,
        )
