"""What became of KV: what was found again, what was computed again, who had to wait for room, and what waiting cost.

Training turns alone count for hits and for tokens computed again; pauses and retention are of all tasks, evaluation
included. Reads events only; what an engine holds at a moment it cannot know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiderl.data.events import (
    Dropped,
    Event,
    KvRetention,
    RunStarted,
    TaskFinished,
    TaskMigrated,
    TaskPaused,
    TurnFinished,
)
from tiderl.observe.pauses import Pauses

BY_TASK = "ctb"
"""The policy under which tasks pause and their KV has a price; figures of that have no meaning under another one."""


@dataclass
class _Computed:
    """Of one training task: how much of its context has been computed."""

    attempt: int
    tokens: int


class KvBook:
    """Feed it every event in order."""

    def __init__(self) -> None:
        self.policy = ""
        self._priority = ""
        self._priority_weights: dict[str, float] = {}
        self._context_tokens = 0
        self._cached_tokens = 0
        self._reprefilled_tokens = 0
        self._paused = 0
        self._migrated = 0
        self._departures = 0
        self._cost_s = 0.0
        self._clairvoyant_s = 0.0
        self._now_s = 0.0
        self._paused_s = 0.0
        self._pauses = Pauses()
        self._computed: dict[tuple[int, int], _Computed] = {}  # (prompt, member)

    @property
    def paused_now(self) -> int:
        """Tasks."""
        return len(self._pauses)

    def observe(self, event: Event) -> None:
        self._now_s = max(self._now_s, event.t_s)
        for pause in self._pauses.observe(event):
            self._paused_s += pause.until_s - pause.since_s
        match event:
            case TurnFinished(split="train"):
                self._turn(event)
            case KvRetention():
                self._departures += event.choice != "keep"
                self._cost_s += event.cost_s
                self._clairvoyant_s += event.clairvoyant_s
            case TaskPaused():
                self._paused += 1
            case TaskMigrated():
                self._migrated += 1
            case Dropped() | TaskFinished(split="train"):
                self._computed.pop((event.prompt_id, event.member), None)
            case RunStarted():
                self._computed.clear()
                self.policy, self._priority = event.kv_policy, event.priority
                self._priority_weights = dict(event.priority_weights)

    def figures(self) -> dict[str, Any]:
        """None for what has no meaning under the run's policy."""
        lasting_s = sum(pause.until_s - pause.since_s for pause in self._pauses.lasting(self._now_s))
        found: dict[str, Any] = {
            "kv_policy": self.policy or None,
            "kv_hit_fraction": self._cached_tokens / self._context_tokens if self._context_tokens else None,
            "kv_reprefilled_tokens": self._reprefilled_tokens,
        }
        of_tasks: dict[str, Any] = {
            "kv_departures": self._departures,
            "kv_retention_ratio": self._cost_s / self._clairvoyant_s if self._clairvoyant_s else None,
            "tasks_paused": self._paused,
            "tasks_migrated": self._migrated,
            "paused_s": self._paused_s + lasting_s,
            "kv_priority": self._priority,
            "kv_priority_weights": self._priority_weights or None,
        }
        return found | (of_tasks if self.policy == BY_TASK else dict.fromkeys(of_tasks))

    def _turn(self, event: TurnFinished) -> None:
        self._context_tokens += event.context_tokens
        self._cached_tokens += event.cached_tokens
        place = (event.prompt_id, event.member)
        task = self._computed.get(place)
        if task is None or task.attempt != event.attempt:
            task = self._computed[place] = _Computed(event.attempt, 0)
        self._reprefilled_tokens += computed_again(event, task.tokens)
        task.tokens = computed_by(event)


def computed_again(turn: TurnFinished, computed_tokens: int) -> int:
    """Tokens of a turn's prefill that its task, which had computed `computed_tokens`, had computed before."""
    prefilled = max(0, turn.context_tokens - turn.cached_tokens)
    return max(0, prefilled - max(0, turn.context_tokens - computed_tokens))


def computed_by(turn: TurnFinished) -> int:
    """How much of its task's context is computed when a turn ends: the last sampled token has no KV yet."""
    return turn.context_tokens + max(0, turn.new_tokens - 1)
