"""The work of a set of groups, apart from any schedule: turns in, and what every legal schedule must spend on them out.

Each figure is a minimum over schedules: KV is kept over a whole trajectory, a group's common prompt is prefilled once,
and a trajectory has its replica to itself. What a version change forces to be computed again is in no figure: it is a
loss with a name of its own, counted where it happens. Knows no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from tiderl.cost.model import CostModel
from tiderl.data.errors import ConfigurationError

SlotsHeld = Literal["step", "task"]


@dataclass(frozen=True, slots=True)
class TurnWork:
    """One turn: tokens that no cache can hold before it, tokens sampled, then seconds of the environment.

    `left_tokens`: of the context before, positions that the turn's own has not or has at another place; above 0 the
    trajectory forks, and what came before is a sequence of its own.
    """

    prefill_tokens: int
    decode_tokens: int
    env_s: float
    left_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TrajectoryWork:
    """One trajectory. `reset_s` is before its first token; the last turn's `env_s` holds the verifier too."""

    turns: tuple[TurnWork, ...]
    reset_s: float = 0.0

    @property
    def loss_tokens(self) -> int:
        return sum(turn.decode_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The trajectories of one prompt. `prompt_tokens` are common to all and computed once; the prompt's last position,
    from which each samples its first token, is not among them but in each trajectory's first turn. `system_tokens` of
    them are common to all groups: read, but computed so rarely that they count as free."""

    prompt_tokens: int
    trajectories: tuple[TrajectoryWork, ...]
    system_tokens: int = 0


def trajectory_work(
    turns: Sequence[tuple[int, int, float]],
    reset_s: float = 0.0,
    forks: Mapping[int, tuple[int, int]] = MappingProxyType({}),
) -> TrajectoryWork:
    """From (tokens sampled, tokens observed, environment seconds) of each turn.

    The KV of a turn's last token is computed with the next turn, so each turn prefills that and the observation.
    `forks`: of a turn before which the context was rewritten, by number: what it computes, and its `left_tokens`.
    """
    work, new = [], 1
    for number, (sampled, observed, env_s) in enumerate(turns):
        computed, left = forks.get(number, (new, 0))
        work.append(TurnWork(computed, sampled, env_s, left))
        new = 1 + observed
    return TrajectoryWork(tuple(work), reset_s)


def group_work(prompt_tokens: int, trajectories: Sequence[TrajectoryWork], system_tokens: int = 0) -> GroupWork:
    """The group of a first prompt of `prompt_tokens`, at least 1, and `trajectory_work`s."""
    return GroupWork(prompt_tokens - 1, tuple(trajectories), min(system_tokens, prompt_tokens - 1))


@dataclass(frozen=True)
class Demand:
    """What each of M groups needs at least, under one cost model: arrays float64 [M], rank-seconds unless said."""

    count_s: np.ndarray
    """Rollout, an iteration shared by at most `max_batch` sequences."""
    context_s: np.ndarray
    """Rollout, an iteration shared by at most `kv_tokens` of context."""
    kv_token_s: np.ndarray
    """KV positions of its own times seconds."""
    reference_s: np.ndarray
    actor_s: np.ndarray
    latency_s: np.ndarray
    """Seconds from the first token's weights to a ready group: resets left out."""
    start_latency_s: np.ndarray
    """Seconds from its issue to a ready group."""
    shortest_s: np.ndarray
    """Seconds from its issue to its first finished trajectory."""
    reset_s: np.ndarray
    """Seconds of resets, summed over trajectories."""
    step_s: np.ndarray
    """Environment seconds, resets included, summed over trajectories."""
    task_s: np.ndarray
    """Seconds of its trajectories from reset to end, summed."""
    loss_tokens: np.ndarray

    @property
    def groups(self) -> int:
        return len(self.count_s)

    @property
    def train_s(self) -> np.ndarray:
        return self.reference_s + self.actor_s


FIELDS = tuple(Demand.__dataclass_fields__)


def demand(
    groups: Sequence[GroupWork], cost: CostModel, *, kv_tokens: int, max_batch: int, with_reference: bool
) -> Demand:
    """Measures every group. `kv_tokens` and `max_batch` are the limits of one replica.

    Raises `ConfigurationError` for no groups, a negative or NaN number, and a trajectory that one replica cannot hold.
    """
    if not groups:
        raise ConfigurationError("a bound needs at least one group", where="workload")
    rows = [_measure(group, number, cost, kv_tokens, max_batch) for number, group in enumerate(groups)]
    table = np.array(rows, dtype=np.float64)
    if not with_reference:
        table[:, FIELDS.index("reference_s")] = 0.0
    return Demand(*table.T)


def _measure(group: GroupWork, number: int, cost: CostModel, kv_tokens: int, max_batch: int) -> list[float]:
    """One group in the order of `Demand`'s fields."""
    where = f"group {number}"
    if not 0 <= group.system_tokens <= group.prompt_tokens or not group.trajectories:
        raise ConfigurationError("a group needs trajectories and no negative prompt", where=where)
    spent = [_spent(trajectory, group.prompt_tokens, cost, where) for trajectory in group.trajectories]
    longest = group.prompt_tokens + max(one.longest for one in spent)
    if longest > kv_tokens:
        raise ConfigurationError(f"a trajectory of {longest} tokens never fits {kv_tokens} tokens of KV", where=where)
    prompt_s = cost.prefill_token_s * (group.prompt_tokens - group.system_tokens)
    decoded, resets_s = sum(one.decoded for one in spent), [one.reset_s for one in group.trajectories]
    trained = sum(one.trained for one in spent)
    work_s = prompt_s + sum(one.work_s for one in spent)
    # A prompt can be computed while the members that reset more slowly still do.
    issued_s = [
        max(reset_s, min(resets_s) + prompt_s) + one.life_s for reset_s, one in zip(resets_s, spent, strict=True)
    ]
    return [
        work_s + cost.iteration_s * decoded / max_batch,
        work_s + cost.iteration_s * sum(one.kept for one in spent) / kv_tokens,
        sum(one.kv_token_s for one in spent),
        cost.reference_token_s * trained,
        cost.actor_token_s * trained,
        prompt_s + max(one.life_s for one in spent),
        max(issued_s),
        min(issued_s),
        sum(resets_s),
        sum(resets_s) + sum(one.waited_s for one in spent),
        sum(resets_s) + sum(one.life_s for one in spent),
        float(decoded),
    ]


@dataclass(slots=True)
class _Spent:
    """Of one trajectory after its common prompt."""

    own_tokens: int = 0  # context at its end, without the last token
    longest: int = 0  # the largest of these over its turns
    trained: int = 0  # tokens of its sequences, the prompt's included
    decoded: int = 0
    kept: int = 0  # own positions resident, summed over the tokens that they are there for
    kv_token_s: float = 0.0
    work_s: float = 0.0  # prefill, sampling and reading, without iterations
    life_s: float = 0.0  # alone on a replica, environment included, reset left out
    waited_s: float = 0.0


def _spent(trajectory: TrajectoryWork, prompt: int, cost: CostModel, where: str) -> _Spent:
    """The first token of a turn comes out of the iteration that ends its prefill, so it reads no context of its own,
    and d tokens take at least d iterations."""
    if not (trajectory.turns and trajectory.reset_s >= 0):
        raise ConfigurationError("a trajectory needs turns and no negative reset", where=where)
    token_s, read_s, out = cost.iteration_s + cost.sequence_s, cost.context_token_s, _Spent()
    for turn in trajectory.turns:
        before = out.own_tokens
        possible = turn.prefill_tokens >= 0 and turn.decode_tokens >= 1 and turn.env_s >= 0
        if not (possible and 0 <= turn.left_tokens <= before):
            raise ConfigurationError(f"impossible turn {turn}", where=where)
        if turn.left_tokens:
            out.trained += prompt + before + 1
        own, tokens = before - turn.left_tokens + turn.prefill_tokens, turn.decode_tokens
        later = tokens - 1
        # Over the tokens after the first: the context is 1, 2, … longer than at the start.
        growth = later * (later + 1) // 2
        reading_s = read_s * ((prompt + own) * later + growth)
        prefill_s = cost.prefill_token_s * turn.prefill_tokens
        out.kept += own * tokens + growth
        out.kv_token_s += (own * tokens + growth) * token_s + read_s * _squares(own, prompt, later)
        out.work_s += prefill_s + cost.sequence_s * tokens + reading_s
        out.life_s += prefill_s + token_s * tokens + reading_s + turn.env_s
        out.waited_s += turn.env_s
        out.decoded += tokens
        out.own_tokens = own + later
        out.longest = max(out.longest, out.own_tokens)
    out.trained += prompt + out.own_tokens + 1
    return out


def _squares(own: int, prompt: int, later: int) -> float:
    """Sum over j = 1 … later of (own + j) * (prompt + own + j): positions held times positions read."""
    ones, squares = later * (later + 1) // 2, later * (later + 1) * (2 * later + 1) // 6
    return float(own * (prompt + own) * later + (prompt + 2 * own) * ones + squares)
