"""A stretch of engine iterations between two changes of the batch, in closed form.

While nobody joins or leaves, b is constant and the attended context C grows by b each iteration, so the first i
iterations take `i * constant + g0 * (C*i + b*i*(i-1)/2)` seconds: one event instead of one per iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Segment:
    """`iterations` may be cut while the segment runs; the rest is fixed."""

    start_s: float
    iterations: int
    constant_s: float  # per iteration, whatever the context
    context_token_s: float
    context_tokens: int  # attended in the first iteration
    growth_tokens: int  # by which that grows each iteration

    def elapsed_s(self, iterations: int) -> float:
        """Seconds of the first `iterations`."""
        context = self.context_tokens * iterations + self.growth_tokens * (iterations * (iterations - 1) // 2)
        return iterations * self.constant_s + self.context_token_s * context

    @property
    def end_s(self) -> float:
        return self.start_s + self.elapsed_s(self.iterations)

    def boundary(self, now_s: float) -> int:
        """The smallest number of whole iterations that ends at `now_s` or later."""
        count = min(self.iterations, self._solve(now_s - self.start_s))
        while count < self.iterations and self.start_s + self.elapsed_s(count) < now_s:
            count += 1
        while count > 0 and self.start_s + self.elapsed_s(count - 1) >= now_s:
            count -= 1
        return count

    def completed(self, now_s: float) -> int:
        """Whole iterations that have ended by `now_s`."""
        count = self.boundary(now_s)
        return count if self.start_s + self.elapsed_s(count) <= now_s else count - 1

    def _solve(self, elapsed_s: float) -> int:
        """About how many iterations take `elapsed_s`: the positive root of the quadratic."""
        square = self.context_token_s * self.growth_tokens / 2
        linear = self.constant_s + self.context_token_s * self.context_tokens - square
        if square <= 0 or square * elapsed_s < 1e-12 * linear * linear:
            return max(0, int(elapsed_s / linear))
        return max(0, int((math.sqrt(linear * linear + 4 * square * elapsed_s) - linear) / (2 * square)))
