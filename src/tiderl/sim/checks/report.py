"""What the checks found: broken invariants in words, and what happened at all.

A rule that nothing exercised proves nothing, so the rules also note the situations that they saw. Knows no rule.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

KEPT = 20
"""Violations kept of one run: the first ones tell, the others follow from them."""


@dataclass
class Findings:
    """Filled by the rules while the run goes on."""

    violations: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    """Situations by name."""

    def wrong(self, invariant: str, what: str) -> None:
        if len(self.violations) < KEPT:
            self.violations.append(f"{invariant} at {_now_s():.6g} s: {what}")

    def require(self, holds: bool, invariant: str, what: str) -> None:
        if not holds:
            self.wrong(invariant, what)

    def saw(self, situation: str) -> None:
        self.seen[situation] += 1


def _now_s() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return 0.0
