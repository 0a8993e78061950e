"""What runs on one replica, as the runtime asked for it: how much KV that needs at least, and how long turns take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tiderl.data.records import TaskKey
from tiderl.data.turns import EngineCapabilities, Turn


@dataclass
class Replica:
    """Tokens are KV positions, of contexts before their turns."""

    capabilities: EngineCapabilities
    common_tokens: int = 0
    """Of the prompts, what groups may have in common at most."""
    running: dict[TaskKey, tuple[int, float]] = field(default_factory=dict)
    """Task to the length of its turn's context, and since when it runs."""
    first: dict[TaskKey, int] = field(default_factory=dict)
    """Shortest context that a task has asked for here: of its first turn, where that was here."""
    longest_s: float = 0.0
    """Of the turns that have ended."""
    outgrown_s: float = math.inf
    """Since when more is charged than there is: turns have said more than was expected of them."""

    def starts(self, turn: Turn, now_s: float) -> None:
        tokens = len(turn.ids)
        self.first[turn.task] = min(tokens, self.first.get(turn.task, tokens))
        self.running[turn.task] = (tokens, now_s)

    def ends(self, task: TaskKey, now_s: float) -> None:
        """Whichever way."""
        _, since_s = self.running.pop(task, (0, now_s))
        self.longest_s = max(self.longest_s, now_s - since_s)

    def longest_until(self, now_s: float) -> float:
        """Seconds of the longest turn, those that run included."""
        return max(self.longest_s, *(now_s - since_s for _, since_s in self.running.values()), 0.0)

    def needed_tokens(self) -> int:
        """What the running turns hold at least: what the members of a group may have begun with, once, and once what
        all groups may have begun with. Which groups do is not known here, so all of them may."""
        lengths = {task: tokens for task, (tokens, _) in self.running.items()}
        if not self.capabilities.shares_prompts:
            return sum(lengths.values())
        begins: dict[tuple[str, int], int] = {}
        for task in lengths:
            group = (task.split, task.prompt_id)
            begins[group] = max(begins.get(group, 0), self.first[task])
        common = min(self.common_tokens, max(begins.values(), default=0))
        prompts = common + sum(max(0, tokens - common) for tokens in begins.values())
        return prompts + sum(tokens - self.first[task] for task, tokens in lengths.items())
