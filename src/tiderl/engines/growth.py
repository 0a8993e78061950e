"""How far a running turn will probably grow: the quantile of what recent turns used of their `max_new_tokens`.

I4 lets reservations rest on a chosen quantile of growth; what grows further asks again. Knows numbers only.
"""

from __future__ import annotations

import math
from collections import deque

REMEMBERED_TURNS = 256  # recent enough to follow a policy that changes, long enough for a quantile
FIRST_TURNS = 16  # before so many have ended, a turn is expected to use all it may


class Growth:
    """`observe` turns that ended by themselves, `expect` for the next one. `quantile` 1.0: always everything."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._fractions: deque[float] = deque(maxlen=REMEMBERED_TURNS)
        self._expected_fraction: float | None = 1.0  # None: to be computed again

    def observe(self, sampled_tokens: int, max_new_tokens: int) -> None:
        self._fractions.append(sampled_tokens / max_new_tokens)
        self._expected_fraction = None

    def expect(self, max_new_tokens: int) -> int:
        """Tokens to reserve for a turn that may sample `max_new_tokens` (at least 1): from 1 to all of them."""
        if self._expected_fraction is None:
            self._expected_fraction = self._measured_fraction()
        return min(max_new_tokens, max(1, math.ceil(self._expected_fraction * max_new_tokens)))

    def _measured_fraction(self) -> float:
        count = len(self._fractions)
        if self._quantile >= 1.0 or count < FIRST_TURNS:
            return 1.0
        return sorted(self._fractions)[max(0, math.ceil(self._quantile * count) - 1)]
