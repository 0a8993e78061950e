"""Advantages from a group's rewards: pure numpy, float64.

Keeps I9: members are named by number, never by place in a batch, and a non-finite reward never becomes an advantage.
A group of equal rewards teaches nothing: its advantages are exactly 0. Knows nothing of tokens or models.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tiderl.data.errors import InvariantViolation, NumericalFault
from tiderl.data.records import Sequence as TrainSequence
from tiderl.data.settings import AdvantageName

STD_FLOOR = 1e-4
"""Added to the standard deviation, so that rewards which differ by rounding alone are not blown up to size 1."""
LARGEST_REWARD = 1e30
"""Squares of such rewards are finite in float64, and differences in float32."""


def group(rewards: np.ndarray) -> np.ndarray:
    """`(R_i - mean) / (std + STD_FLOOR)` with the population standard deviation (GRPO). float64 [G] -> float64 [G]."""
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + STD_FLOOR)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """`R_i - mean of the other members` (RLOO). float64 [G] -> float64 [G]."""
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - others


ADVANTAGES: dict[AdvantageName, Callable[[np.ndarray], np.ndarray]] = {
    "group": group,
    "leave_one_out": leave_one_out,
}


def is_uninformative(rewards: np.ndarray) -> bool:
    """True where all members have the same reward, or there is only one: every advantage is then exactly 0."""
    return len(rewards) < 2 or bool(rewards.min() == rewards.max())


def advantages(name: AdvantageName, rewards: np.ndarray) -> np.ndarray:
    """The advantages of one whole group, by member. float64 [G] -> float64 [G], finite in float32.

    Raises `InvariantViolation` for a non-finite reward (I9), `NumericalFault` for rewards too large to compare.
    """
    rewards = np.asarray(rewards, np.float64)
    if not np.isfinite(rewards).all():
        raise InvariantViolation(f"a non-finite reward reached the trainer: {rewards.tolist()}", where="I9")
    if is_uninformative(rewards):
        return np.zeros_like(rewards)
    if np.abs(rewards).max() > LARGEST_REWARD:
        raise NumericalFault(
            f"rewards too large to compare: {rewards.min():g} … {rewards.max():g}",
            where="advantages",
            hint="scale the environment's reward to the order of 1",
        )
    return ADVANTAGES[name](rewards)


def sequence_advantage(name: AdvantageName, sequence: TrainSequence) -> float:
    """The advantage of one sequence's member within its group. Raises as `advantages`, and `InvariantViolation` when
    the group's rewards do not hold this member's reward under its number."""
    rewards, member = sequence.group_rewards, sequence.member
    if not 0 <= member < len(rewards) or rewards[member] != sequence.reward:
        raise InvariantViolation(
            f"the rewards of group {sequence.prompt_id} {np.asarray(rewards).tolist()} do not hold "
            f"{sequence.reward} for member {member}",
            where=f"I9, trajectory {sequence.trajectory_id}",
        )
    return float(advantages(name, rewards)[member])
