"""Measured signals of readiness: RAS, TPRM and HoL (architecture §2). Definitions as in the TideRL paper's digests.

A controller: `observe` what became ready, `ready_at_start` and friends answer at any moment. Time comes in as argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TPRM_SMOOTHING = 0.2
"""Weight of the newest interval in the moving average: about the last five arrivals count."""


@dataclass
class ReadinessSignals:
    """Readiness of the buffer, in micro-batches of `micro_batch_tokens` tokens."""

    micro_batch_tokens: int
    interval_s: float | None = None
    last_ready_s: float | None = None
    _tokens: float = 0.0

    def observe(self, now_s: float, tokens: int) -> None:
        """A group of this many tokens became ready."""
        self._tokens += tokens
        if self._tokens < self.micro_batch_tokens:
            return
        count, self._tokens = divmod(self._tokens, self.micro_batch_tokens)
        if self.last_ready_s is not None:
            newest = (now_s - self.last_ready_s) / count
            previous = newest if self.interval_s is None else self.interval_s
            self.interval_s = previous + TPRM_SMOOTHING * (newest - previous)
        self.last_ready_s = now_s

    def time_per_ready_microbatch_s(self, now_s: float) -> float | None:
        """TPRM: the smoothed interval, or the time since the last arrival where that is longer; None before two
        arrivals."""
        if self.interval_s is None or self.last_ready_s is None:
            return None
        return max(self.interval_s, now_s - self.last_ready_s)


def ready_microbatches(ready_tokens: int, micro_batch_tokens: int) -> int:
    """RAS: whole micro-batches that are ready now."""
    return ready_tokens // micro_batch_tokens


def head_of_line_s(now_s: float, ready_since_s: Sequence[float]) -> float:
    """HoL: the age of the oldest ready group, 0 when none is ready."""
    return now_s - min(ready_since_s) if ready_since_s else 0.0
