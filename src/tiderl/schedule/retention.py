"""Keep, offload or drop the KV of a task that waits: ski rental with a price.

Memory has a price while others queue for it. Holding c tokens for a second costs λ·c seconds of the engine's work, λ
being what one token-second of the pool is worth; bringing them back costs R = c·(seconds to compute, or to load, one
token). Keeping for at most τ = R / (λ·c) costs at most twice what a clairvoyant would pay, with no prediction at all
(Karlin, Manasse, Rudolph and Sleator, "Competitive snoopy caching", 1988). With the measured waits the best τ is that
of least expected cost; it stays within a factor ρ of the first, so that a wrong histogram costs at most 1 + ρ times
what a clairvoyant would pay.

λ follows from the pool itself. X turns a second that run for a(b) seconds, b = X·a of them at a time, and hold their c
tokens for H(τ) = E[min(T, τ)] of their wait T, fill it: X·c·(a + H) = M. Computing context takes the engine
D(τ) = c·r·P(T > τ) seconds a turn, in which nobody else advances: with a(b) = (A + B·b) / (1 − X·D), X is largest where
dH = −(b / ε)·dD, ε = A / a = d ln X / d ln b. So a token-second is worth ε / (b·c), b·c being what runs, and not ε / M:
where most of the pool waits, memory is worth more than its share. Who computes again delays itself too, which counts
where hardly anybody else runs: λ = ε / (c + b·c).

Loading c tokens from host memory, r seconds each, delays only their own task, in whose room they lie meanwhile: the
turn takes a + H + c·r·P(T > τ). So it costs what holding them for c·r seconds costs, λ·c·c·r, and τ = c·r. That holds
while the link has time for all of them: so only where a token is loaded faster than computed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Choice = Literal["keep", "offload", "drop"]

ROBUSTNESS = 4.0
"""The measured best stays within this factor of the deterministic τ, above and below."""

TRUSTED_WAITS = 64
"""Before so many waits are measured, the deterministic τ counts."""

REMEMBERED_WAITS = 512
REFRESH_EVERY = 32


def leaves_by(compute_token_s: float, reload_token_s: float | None) -> Choice:
    """How KV leaves when it does, by the seconds that either way back takes for a token; None: there is no host
    memory."""
    return "offload" if reload_token_s is not None and reload_token_s < compute_token_s else "drop"


@dataclass(frozen=True)
class Price:
    """What memory and bringing KV back cost now, on one replica."""

    token_second: float
    """λ: engine seconds lost for each token held for a second; 0 while nobody queues."""
    compute_token_s: float
    """Engine seconds to compute one token's KV again."""
    reload_token_s: float | None = None
    """Seconds to load one token's KV from host memory; None where it cannot be offloaded."""
    context_tokens: float = 0.0
    """Of a task here, on average."""

    def back_token_s(self, tokens: float) -> float:
        """Engine seconds that bringing so many tokens back costs for each of them, by the cheaper way."""
        if self.leave == "drop":
            return self.compute_token_s
        return min(self.compute_token_s, self.token_second * tokens * (self.reload_token_s or 0.0))

    @property
    def leave(self) -> Choice:
        """How KV leaves, when it does: to host memory where loading is faster than computing, so that the link that all
        loads share brings back no less than computing would."""
        return leaves_by(self.compute_token_s, self.reload_token_s)

    @property
    def hold_s(self) -> float:
        """τ of the deterministic rule, for a context of average length; infinite when memory is free."""
        return self.back_token_s(self.context_tokens) / self.token_second if self.token_second > 0 else math.inf


def memory_price(delayed_tokens: float, elasticity: float) -> float:
    """λ of a pool that others queue for; 0 while nobody is there.

    `delayed_tokens`: KV of the turns that computing again delays, c + b·c: those that run now, and its own.
    `elasticity`: ε = d ln(throughput) / d ln(tasks that run), from 0 (the engine is full) to 1 (it is mostly idle).
    """
    return elasticity / delayed_tokens if delayed_tokens > 0.0 else 0.0


def best_hold_s(waits_s: Sequence[float], hold_s: float) -> float:
    """argmin over τ of E[min(T, τ)] + hold_s·P(T > τ), T uniform over `waits_s`. 0, a measured wait, or infinity.

    Costs are in units of λ·c, in which bringing KV back costs `hold_s` seconds.
    """
    if not len(waits_s) or math.isinf(hold_s):
        return math.inf
    waits = np.sort(np.asarray(waits_s, dtype=np.float64))
    count = len(waits)
    held = np.concatenate([[0.0], np.cumsum(waits)])
    above = count - np.arange(count + 1)  # waits longer than τ, for τ = 0 and each wait (equal ones count as over)
    taus = np.concatenate([[0.0], waits])
    costs = held + taus * above + hold_s * above
    best = int(np.argmin(costs))
    return math.inf if best == count else float(taus[best])


class Waits:
    """The measured waits of one kind of task, and the time to hold that follows from them."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=REMEMBERED_WAITS)
        self._stale = 0
        self._known: tuple[float, float] | None = None
        self.mean_s = 0.0

    def observe(self, seconds: float) -> None:
        self._waits.append(seconds)
        self._stale += 1
        self.mean_s += (seconds - self.mean_s) / len(self._waits)

    def hold_s(self, base: float) -> float:
        """How long to keep KV, where the deterministic rule says `base` seconds (`Price.hold_s`)."""
        if base <= 0.0 or math.isinf(base) or len(self._waits) < TRUSTED_WAITS:
            return base
        if self._known is None or self._stale >= REFRESH_EVERY or not 0.8 < self._known[0] / base < 1.25:
            self._known, self._stale = (base, best_hold_s(self._waits, base)), 0
        return min(max(self._known[1], base / ROBUSTNESS), base * ROBUSTNESS)


@dataclass(frozen=True)
class Outcome:
    """One wait that is over: what was decided and what it would have been with hindsight, in engine seconds. Memory is
    charged for the time in which others queued for it or, once it went, had it."""

    choice: Choice
    tokens: int
    waited_s: float
    held_s: float
    price: Price
    queued_s: float
    """Of `waited_s`, how long others queued for the memory or had it."""
    held_queued_s: float
    """Of `held_s`, how long they queued."""

    @property
    def cost_s(self) -> float:
        back = 0.0 if self.choice == "keep" else self.tokens * self.price.back_token_s(self.tokens)
        return self.price.token_second * self.tokens * self.held_queued_s + back

    @property
    def clairvoyant_s(self) -> float:
        return self.tokens * min(self.price.token_second * self.queued_s, self.price.back_token_s(self.tokens))
