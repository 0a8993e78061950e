"""A policy that says far more than it would: what a simulated engine asks of its tasks, with turns that outgrow.

A turn that is asked again, after an interruption or on another replica, says the same; another attempt does not.
"""

from __future__ import annotations

from tiderl.data.records import TaskKey
from tiderl.sim.engine import Talk
from tiderl.sim.faults.plan import Dice
from tiderl.sim.kv import Shared


class FaultyTalk:
    """`inner`, with turns that say 2 to 20 times as much; budgets cut them as any other."""

    def __init__(self, inner: Talk, dice: Dice) -> None:
        self._inner, self._dice = inner, dice
        self._factors: dict[tuple[TaskKey, int], float] = {}

    def action_tokens(self, key: TaskKey, turn: int) -> int:
        factor = self._factors.get((key, turn))
        if factor is None:
            factor = self._dice.factor("turn_outgrows") if self._dice.strikes("turn_outgrows") else 1.0
            self._factors[key, turn] = factor
        return round(factor * self._inner.action_tokens(key, turn))

    def shared_prompt(self, key: TaskKey) -> Shared:
        return self._inner.shared_prompt(key)
