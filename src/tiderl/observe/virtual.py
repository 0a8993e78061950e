"""The live line of a run in virtual time: how far it is, every few real seconds.

Reads the run's own figures at its events, and the real clock at few of them: a simulation makes a hundred thousand
events a second. Knows no runtime and writes nothing that a simulation keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tiderl.data.events import Event
from tiderl.observe.live import LINE_S
from tiderl.observe.metrics import RunMetrics
from tiderl.observe.words import count, duration

EVENTS_A_LOOK = 1000
"""Between two looks at the clock: about a hundredth of a second."""


class VirtualProgress:
    """An observer of one simulation, beside the `metrics` that it is measured by; `say` gets each line."""

    def __init__(
        self, metrics: RunMetrics, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.metrics, self.say, self.clock = metrics, say, clock
        self.events = 0
        self._began_s = self._said_s = clock()

    def observe(self, event: Event) -> None:
        self.events += 1
        if self.events % EVENTS_A_LOOK == 0 and (now := self.clock()) - self._said_s >= LINE_S:
            self._said_s = now
            self.say(self.line(now))

    def line(self, now_s: float) -> str:
        """The state in one line; `left` are real seconds at the pace so far."""
        updates, total = progress(self.metrics)
        parts = [f"update {updates}/{total}", f"{duration(self.metrics.clock_s)} of virtual time"]
        parts.append(f"{self.events:,} events")
        if updates:
            parts.append(f"left {duration((now_s - self._began_s) / updates * (total - updates))}")
        return "  ".join(parts)


def progress(metrics: RunMetrics) -> tuple[int, int]:
    """Updates made, and to make."""
    return metrics.updates, metrics.started.updates if metrics.started else 0


def stopped(metrics: RunMetrics) -> str:
    """What an interrupted simulation says of itself."""
    updates, total = progress(metrics)
    return f"stopped after {updates:,} of {count(total, 'update')} simulated"
