"""The live view of a run, on stderr: one screen on a terminal, one line now and then elsewhere.

Derived from events; it draws when an event comes and at most a few times a second, so it needs no thread and the run
never waits for it longer than one drawing. Knows no runtime: what happens between events it cannot show.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tiderl.data.events import EvalFinished, Event, Fault, RankLostEvent, RunEnded, UpdateCommitted
from tiderl.observe.kv import BY_TASK
from tiderl.observe.metrics import RunMetrics
from tiderl.observe.words import count, duration, fraction, number

SCREEN_S = 0.25
"""Between two drawings of the screen: smooth to the eye, and under 1 % of a core."""
LINE_S = 5.0
"""Between two lines where stderr is a file or a pipe."""
RECENT_UPDATES = 5
"""The reward shown is their mean: a single batch of a few groups is mostly noise."""


class LiveView:
    """An observer of `api.train`. `close` it in any case: it gives the terminal's cursor back."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.clock = clock
        self.metrics = RunMetrics()
        self.rewards: list[float] = []
        self._drawn_s = self._warned_s = -float("inf")
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def observe(self, event: Event) -> None:
        self.metrics.observe(event)
        if isinstance(event, UpdateCommitted):
            self.rewards = [*self.rewards, event.reward_mean][-RECENT_UPDATES:]
        elif isinstance(event, Fault) and (said := handled(event)) and self.clock() - self._warned_s >= LINE_S:
            self._warned_s = self.clock()
            self._print(said)
        if self._live:
            if self._due(SCREEN_S) or isinstance(event, RunEnded):
                self._live.start()
                self._live.update(self.screen(), refresh=True)
            return
        if isinstance(event, EvalFinished):
            success = fraction(event.successes / event.prompts if event.prompts else None)
            failed = f", {event.failed} more failed" if event.failed else ""
            of = count(event.prompts, "prompt")
            self._print(f"held-out success of version {event.version}: {success} over {of}{failed}")
        elif isinstance(event, RankLostEvent):
            self._print(f"rank {event.rank} was lost with {count(event.tasks, 'task')}: {event.reason}")
        elif self._is_worth_a_line(event):
            self._print(self.line())

    def _is_worth_a_line(self, event: Event) -> bool:
        """Progress, or failures: the latter also where nothing is ever committed."""
        if isinstance(event, UpdateCommitted):
            return self._due(LINE_S) or event.update == self.total_updates
        return isinstance(event, Fault) and not handled(event) and self._due(LINE_S)

    def recall(self, event: Event) -> None:
        """An event of an earlier driver of this run: counted, not shown."""
        self.metrics.observe(event)

    def note(self, text: str) -> None:
        """A line that stays above the screen."""
        self._print(text)

    def close(self) -> None:
        if self._live:
            self._live.stop()

    @property
    def total_updates(self) -> int:
        return self.metrics.started.updates if self.metrics.started else 0

    @property
    def left_s(self) -> float | None:
        """Seconds to the last update at the pace since the first issued task; None before the first commit."""
        metrics = self.metrics
        if not metrics.updates or metrics.first_issue_s is None:
            return None
        return (metrics.clock_s - metrics.first_issue_s) / metrics.updates * (self.total_updates - metrics.updates)

    def line(self) -> str:
        """The state in one line; what only updates tell comes with the first."""
        shown = self.metrics.figures()
        begun, held_out, dropped = self.metrics.updates > 0, shown["eval_success_last"], sum(shown["dropped"].values())
        parts = [
            f"update {self.metrics.updates}/{self.total_updates}",
            f"reward {number(self._reward())}" if begun else "",
            "" if held_out is None else f"held-out {fraction(held_out)}",
            f"{number(shown['goodput_tokens_per_s'])} tok/s" if begun else "",
            f"staleness {number(shown['staleness_mean_tokens'])} (max {shown['staleness_max']})" if begun else "",
            f"waits: trainer {duration(shown['twt_s'])}, rollout {duration(shown['rwt_s'])}" if begun else "",
            f"in flight {shown['in_flight']}{self._paused()}",
            f"left {duration(self.left_s)}" if begun else "",
            f"dropped {dropped}" if dropped else "",
        ]
        return "  ".join(part for part in parts if part)

    def screen(self) -> RenderableType:
        """The state as a small table under a progress bar."""
        shown = self.metrics.figures()
        head = Table.grid(padding=(0, 2), expand=False)
        head.add_row(
            Text(f"{shown['strategy'] or 'starting'}", style="bold"),
            ProgressBar(total=max(1, self.total_updates), completed=self.metrics.updates, width=36),
            f"update {self.metrics.updates}/{self.total_updates}",
            self._time(),
        )
        table = Table.grid(padding=(0, 2))
        for left, right in self._rows():
            table.add_row(Text(left[0], style="dim"), left[1], Text(right[0], style="dim"), right[1])
        return Group(head, table)

    def _rows(self) -> list[tuple[tuple[str, str], tuple[str, str]]]:
        shown = self.metrics.figures()
        faults = sum(self.metrics.faults.values()) + self.metrics.ranks_lost
        first, last = fraction(shown["eval_success_first"]), fraction(shown["eval_success_last"])
        return [
            (
                ("reward", f"{number(self._reward())} (first {number(shown['reward_first'])})"),
                ("held-out success", f"{last} (first {first})"),
            ),
            (
                ("goodput", f"{number(shown['goodput_tokens_per_s'])} tokens/s"),
                (
                    "staleness",
                    f"{number(shown['staleness_mean_tokens'])} mean, {number(shown['staleness_max'], 0)} max",
                ),
            ),
            (
                ("trainer waited", duration(shown["twt_s"])),
                ("rollout waited", duration(shown["rwt_s"])),
            ),
            (
                ("in flight", f"{shown['in_flight']:,} of {shown['issued']:,} issued{self._paused()}"),
                ("dropped, faults", f"{sum(shown['dropped'].values()):,}, {faults:,}"),
            ),
        ]

    def _paused(self) -> str:
        """Of the tasks in flight, evaluation included."""
        return f", {self.metrics.kv.paused_now:,} paused" if self.metrics.kv.policy == BY_TASK else ""

    def _time(self) -> str:
        if self.metrics.first_issue_s is None:
            return "warming up"
        return f"{duration(self.metrics.clock_s)} so far, {duration(self.left_s)} left"

    def _reward(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def _due(self, interval_s: float) -> bool:
        now = self.clock()
        if now - self._drawn_s < interval_s:
            return False
        self._drawn_s = now
        return True

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


def handled(fault: Fault) -> str:
    """What a person must know at once of a fault that was handled; empty for those that the summary counts."""
    what, _, name = fault.where.partition(" ")
    if what == "restore":
        return f"checkpoint {name} is missing or damaged: the one before it is used, what came after is redone"
    if what == "checkpoint":
        return f"checkpoint {name} could not be written: the run goes on, and the last good one is kept"
    return ""
