"""What more tasks would gain on an engine, and what computing KV again costs there, measured from its turns.

Little's law (1961) for the turns inside: b of them that take a(b) seconds each end at the rate b / a(b), so the gain of
more is d ln X / d ln b = 1 − d ln a / d ln b. a(b) is taken as a line through the means of turns that ran beside about
as many others, and the time in which nothing runs counts as all gain. Knows no clock and no engine.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

MEMORY = 64
"""Turns that count in the mean of a batch size, about."""

MIN_TURNS = 8
"""Before so many, nothing is claimed: computing again counts as free, and engines as idle."""

REMEMBERED_TOKENS = 1e5
"""Computed tokens that count in the mean seconds of one, about."""

REMEMBERED_PREFILLS = 256
PREFILL_QUANTILE = 0.05
"""A turn's prefill takes at least as long as its tokens need, and mostly waits for others': where the engine
does not measure them, the cheapest tell."""

REFRESH_EVERY = 16

LEAST = 0.05
"""Elasticity of a busy engine is not taken as less: a line through noisy means may leave nothing."""

FULL = 0.01
"""Of one whose batch is full: not quite nothing, since turns end."""

REMEMBERED_TURNS = 32.0
"""What runs, and whether anything does, is an average over the time in which about so many turns end."""


@dataclass
class Bin:
    """Turns beside about as many others."""

    turns: int = 0
    running: float = 0.0
    seconds: float = 0.0

    def observe(self, running: int, seconds: float) -> None:
        self.turns += 1
        share = 1.0 / min(self.turns, MEMORY)
        self.running += share * (running - self.running)
        self.seconds += share * (seconds - self.seconds)


@dataclass
class EngineRates:
    """Of one replica. Feed it every turn that ended."""

    turns: int = 0
    active_s: float = 0.0
    """Mean seconds that a turn runs."""
    running: float = 0.0
    """Turns that run, on average over the last time."""
    _bins: dict[int, Bin] = field(default_factory=dict)  # by the binary logarithm of the batch
    _told: tuple[int, float] = (0, 0.0)
    _measured: tuple[float, float] = (0.0, 0.0)  # tokens and seconds
    _prefills: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_PREFILLS))
    _line: tuple[float, float] = (1.0, 0.0)
    _compute_token_s: float = 0.0
    _refresh_at: int = MIN_TURNS  # turns
    _idle: float = 0.0
    _since_s: float | None = None

    def observe(
        self,
        *,
        computed_tokens: int,
        new_tokens: int,
        prefill_s: float,
        decode_s: float,
        running: int,
        prefilled_tokens: int = 0,
        prefilled_s: float = 0.0,
    ) -> None:
        """`computed_tokens`: of the context, not found in the cache. `running`: turns in the batch, this one too.
        `prefilled_tokens`, `prefilled_s`: all that the engine computed of contexts since it began, and what that took;
        0 seconds where it does not know."""
        if prefilled_s > 0.0:
            self._prefilled(prefilled_tokens, prefilled_s)
        if new_tokens < 1:
            return
        self.turns += 1
        running = max(1, running)
        seconds = prefill_s + decode_s
        self.active_s += (seconds - self.active_s) / min(self.turns, MEMORY)
        self._bins.setdefault(running.bit_length(), Bin()).observe(running, seconds)
        if computed_tokens > 0:
            self._prefills.append(prefill_s / computed_tokens)

    def _prefilled(self, tokens: int, seconds: float) -> None:
        """Older seconds and tokens count less, by tokens. Less than before: the process is new."""
        more_tokens, more_s = tokens - self._told[0], seconds - self._told[1]
        self._told = (tokens, seconds)
        if more_tokens > 0 and more_s > 0.0:
            kept = math.exp(-more_tokens / REMEMBERED_TOKENS)
            self._measured = (kept * self._measured[0] + more_tokens, kept * self._measured[1] + more_s)

    @property
    def known(self) -> bool:
        return self.turns >= MIN_TURNS

    @property
    def compute_token_s(self) -> float:
        """Engine seconds to compute one token of context; 0 while not known."""
        self._refresh()
        return self._compute_token_s

    def elasticity(self, running: float, max_batch: int = 0) -> float:
        """d ln(turns per second) / d ln(turns that run) with `running` of them, from 0 to 1. 1 while not known.
        `max_batch`: as many run at a time, the others wait in the engine; 0: all."""
        self._refresh()
        base, each = self._line
        total = base + each * max(1.0, running)
        busy = max(LEAST, base / total) if total > 0.0 else 1.0
        gain = self._idle + (1.0 - self._idle) * busy
        return min(gain, FULL) if max_batch and running > max_batch else gain

    def spent(self, now_s: float, *, running: int) -> None:
        """Until now, since the last call, so many turns ran there. While none runs, more tasks would gain all that they
        do."""
        if self._since_s is not None and self.active_s > 0.0:
            turns = (now_s - self._since_s) * max(1.0, self.running) / self.active_s
            share = 1.0 - math.exp(-turns / REMEMBERED_TURNS)
            self._idle += share * (float(not running) - self._idle)
            self.running += share * (running - self.running)
        self._since_s = now_s

    def _refresh(self) -> None:
        if self.turns < self._refresh_at:
            return
        self._refresh_at = self.turns + REFRESH_EVERY
        tokens, seconds = self._measured
        if tokens:
            self._compute_token_s = seconds / tokens
        elif self._prefills:
            self._compute_token_s = float(np.quantile(self._prefills, PREFILL_QUANTILE))
        self._line = fitted_line([b for b in self._bins.values() if b.turns >= MIN_TURNS])


def fitted_line(bins: list[Bin]) -> tuple[float, float]:
    """(base, slope), both at least 0, of seconds over running turns, by least squares of relative errors. One size
    alone says nothing of the slope: half of the time is taken as shared."""
    if not bins:
        return 1.0, 0.0
    x, y = np.array([b.running for b in bins]), np.array([b.seconds for b in bins])
    if len(bins) == 1 or float(np.ptp(x)) < 0.25 * float(x.max()):
        base = float(y.mean()) / 2.0
        return base, base / float(x.mean())
    weight = 1.0 / np.maximum(y, 1e-9)
    columns = np.stack([weight, weight * x], axis=1)
    base, slope = (float(v) for v in np.linalg.lstsq(columns, weight * y, rcond=None)[0])
    if slope < 0.0:
        return float(y.mean()), 0.0
    return (base, slope) if base >= 0.0 else (0.0, float((y / x).mean()))
