"""What simulated ports ask of a workload, whether it is drawn or recorded, and how a whole trajectory of it goes.

The answers are functions of the task alone, never of call order (I10). Knows no engine, clock or strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from tiderl.data.records import Ending, TaskKey
from tiderl.data.settings import WorkloadProfile
from tiderl.data.window import ImageWindow, WindowedContext
from tiderl.sim.kv import Shared

Fault = Literal["timeout", "failure"]


@dataclass(frozen=True)
class PlannedTurn:
    """One turn as it goes when nothing interferes. The context is that before the turn."""

    context_tokens: int
    action_tokens: int
    observation_tokens: int  # added to the context afterwards; 0 after the last turn
    step_s: float
    rewrites: tuple[int, ...] = ()  # as `Turn.rewrites`


@dataclass(frozen=True)
class Plan:
    """A whole trajectory, cut by the budgets as the runtime cuts it."""

    reset_s: float
    turns: tuple[PlannedTurn, ...]
    ending: Ending
    reward: float

    @property
    def tokens(self) -> int:
        """Of the context at its end."""
        last = self.turns[-1]
        return last.context_tokens + last.action_tokens

    @property
    def loss_tokens(self) -> int:
        return sum(turn.action_tokens for turn in self.turns)

    @property
    def waited_s(self) -> float:
        """Seconds in the environment."""
        return self.reset_s + sum(turn.step_s for turn in self.turns)


class Behaviour(Protocol):
    """What simulated ports ask of a workload: drawn (`Workload`) or recorded (`sim/recorded.py`)."""

    profile: WorkloadProfile
    system_tokens: int

    def turns(self, key: TaskKey) -> int: ...
    def succeeds(self, key: TaskKey) -> bool: ...
    def first_tokens(self, key: TaskKey) -> int:
        """Of the first observation."""

    def action_tokens(self, key: TaskKey, turn: int) -> int: ...
    def observation_tokens(self, key: TaskKey, turn: int) -> int: ...
    def shared_prompt(self, key: TaskKey) -> Shared: ...
    def step_s(self, key: TaskKey, turn: int) -> float: ...
    def reset_s(self, key: TaskKey) -> float: ...
    def served_s(self, key: TaskKey, turn: int) -> float:
        """Seconds of a worker that serves one call at a time, for the turn's step, -1 for the reset."""

    def fault(self, key: TaskKey, turn: int) -> Fault | None: ...
    def plan(self, key: TaskKey) -> Plan: ...


def planned(
    behaviour: Behaviour,
    key: TaskKey,
    *,
    max_turns: int,
    max_context_tokens: int,
    max_new_tokens_per_turn: int,
    window: ImageWindow | None = None,
) -> Plan:
    """The trajectory that the runtime plays under these budgets when nothing fails."""
    images = behaviour.profile.observation_images
    context = WindowedContext(window if images else None)
    context.observe(behaviour.first_tokens(key))
    last = behaviour.turns(key) - 1
    turns: list[PlannedTurn] = []
    ending: Ending = "budget_turns"
    for number in range(max_turns):
        room = max_context_tokens - context.tokens
        action = min(behaviour.action_tokens(key, number), max_new_tokens_per_turn, room)
        step_s = behaviour.step_s(key, number)
        observation = behaviour.observation_tokens(key, number)
        if number == last:
            ending = "terminated"
        elif context.tokens_with(action + observation, images) >= max_context_tokens:
            ending = "budget_tokens"
        over = ending != "budget_turns" or number == max_turns - 1
        turns.append(PlannedTurn(context.tokens, action, 0 if over else observation, step_s, context.rewrites))
        if over:
            break
        context.say(action)
        context.observe(observation, ((0, observation),) if images else ())
    reward = 1.0 if ending == "terminated" and behaviour.succeeds(key) else 0.0
    return Plan(behaviour.reset_s(key), tuple(turns), ending, reward)
