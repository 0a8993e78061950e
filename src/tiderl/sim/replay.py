"""A recorded workload in virtual time: the very trajectories of a run or a file, task by task.

The same trajectory costs the same under every strategy (I10): a task is looked up by its prompt and member. Prompts
beyond the recorded ones play recorded groups again, in a fixed order, and can be counted. Faults of the recorded run
are not played again: a trajectory that ended is. Knows no engine, clock or strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tiderl.cost.calibrate import Calibration
from tiderl.cost.recorded import RESET, EnvCall, Recording, TurnFact
from tiderl.data.errors import ConfigurationError
from tiderl.data.records import TaskKey
from tiderl.data.settings import WorkloadProfile
from tiderl.sim.behaviour import Fault, Plan, planned
from tiderl.sim.kv import Shared
from tiderl.sim.traces import TracedTrajectory, TracedTurn, fitted_profile

Group = tuple[TracedTrajectory, ...]


class TracedWorkload:
    """The `Behaviour` of recorded groups under a run's budgets.

    `train`, `held_out`: prompt number -> its group's trajectories, by member. Raises `ConfigurationError` for no group,
    and for a first observation that leaves no room for a token.
    """

    def __init__(
        self,
        train: Mapping[int, Group],
        held_out: Mapping[int, Group],
        *,
        where: str,
        max_turns: int,
        max_context_tokens: int,
        max_new_tokens_per_turn: int,
        score_s: float = 0.0,
        system_tokens: int = 0,
    ) -> None:
        """`system_tokens`: of the first observations, how many groups may have in common."""
        if not train:
            raise ConfigurationError("no group of trajectories was recorded to its end", where=where)
        self._groups = {"train": dict(train), "eval": dict(held_out or train)}
        self._again = {split: [groups[at] for at in sorted(groups)] for split, groups in self._groups.items()}
        self.max_turns, self.max_context_tokens = max_turns, max_context_tokens
        self.max_new_tokens_per_turn = max_new_tokens_per_turn
        everyone = [one for groups in (train, held_out) for group in groups.values() for one in group]
        longest = max(one.first_tokens for one in everyone)
        if longest >= max_context_tokens:
            raise ConfigurationError(
                f"a recorded first observation has {longest} tokens, the context {max_context_tokens}",
                where="rollout.max_context_tokens",
                hint=f"give at least {longest + 1}",
            )
        self.profile: WorkloadProfile = fitted_profile(everyone, score_s=score_s)
        self.system_tokens = system_tokens

    def recycled(self, prompt_ids: Iterable[int]) -> int:
        """How many of these training prompts played the group of another one."""
        return sum(prompt_id not in self._groups["train"] for prompt_id in prompt_ids)

    def turns(self, key: TaskKey) -> int:
        return len(self._trajectory(key).turns)

    def succeeds(self, key: TaskKey) -> bool:
        return (self._trajectory(key).reward or 0.0) > 0

    def first_tokens(self, key: TaskKey) -> int:
        return self._trajectory(key).first_tokens

    def action_tokens(self, key: TaskKey, turn: int) -> int:
        """At least 1: a policy samples a stop token. 1 too after the recorded end, which nobody asks for."""
        found = self._turn(key, turn)
        return 1 if found is None else max(1, found.sampled_tokens)

    def observation_tokens(self, key: TaskKey, turn: int) -> int:
        found = self._turn(key, turn)
        return 1 if found is None else max(1, found.observed_tokens)

    def shared_prompt(self, key: TaskKey) -> Shared:
        """All of the first observation, or what the shortest one of the group has."""
        tokens = min(one.first_tokens for one in self._group(key))
        return (((key.split, key.prompt_id), tokens),)

    def step_s(self, key: TaskKey, turn: int) -> float:
        found = self._turn(key, turn)
        return 0.0 if found is None or found.step_s is None else found.step_s

    def reset_s(self, key: TaskKey) -> float:
        return self._trajectory(key).reset_s or 0.0

    def served_s(self, key: TaskKey, turn: int) -> float:
        if turn == RESET:
            return self._trajectory(key).reset_served_s
        found = self._turn(key, turn)
        return 0.0 if found is None else found.served_s

    def fault(self, key: TaskKey, turn: int) -> Fault | None:
        return None

    def plan(self, key: TaskKey) -> Plan:
        """As `Workload.plan`."""
        return planned(
            self,
            key,
            max_turns=self.max_turns,
            max_context_tokens=self.max_context_tokens,
            max_new_tokens_per_turn=self.max_new_tokens_per_turn,
        )

    def _group(self, key: TaskKey) -> Group:
        split = "eval" if key.split == "eval" else "train"
        own = self._groups[split].get(key.prompt_id)
        return self._again[split][key.prompt_id % len(self._again[split])] if own is None else own

    def _trajectory(self, key: TaskKey) -> TracedTrajectory:
        group = self._group(key)
        return group[key.member % len(group)]

    def _turn(self, key: TaskKey, turn: int) -> TracedTurn | None:
        turns = self._trajectory(key).turns
        return turns[turn] if turn < len(turns) else None


def groups_of_file(trace: Sequence[TracedTrajectory], group_size: int) -> dict[int, Group]:
    """A file does not tell which trajectories are of one prompt: as many in a row as a group has, around and around
    until every trajectory was in one."""
    count = -(-len(trace) // group_size)
    return {
        group: tuple(trace[(group * group_size + member) % len(trace)] for member in range(group_size))
        for group in range(count)
    }


def groups_of_run(recording: Recording, calibration: Calibration, *, group_size: int) -> dict[str, dict[int, Group]]:
    """Split -> prompt number -> the group's trajectories, of groups all of whose members came to their end: training
    ones need `group_size` of them."""
    turns: dict[TaskKey, dict[int, list[TurnFact]]] = {}
    for turn in recording.turns:
        turns.setdefault(turn.key, {}).setdefault(turn.turn, []).append(turn)
    calls = {(call.key, call.turn): call for call in recording.env_calls}
    members: dict[str, dict[int, dict[int, TracedTrajectory]]] = {"train": {}, "eval": {}}
    for key, end in sorted(recording.finished.items(), key=lambda item: item[0]):
        played = turns.get(key, {})
        if len(played) == end.turns and all((key, turn) in calls for turn in (RESET, *played)):
            group = members[key.split].setdefault(key.prompt_id, {})
            group[key.member] = _trajectory(key, played, calls, calibration, end.reward)  # of the last attempt
    return {
        split: {
            prompt_id: tuple(group[member] for member in sorted(group))
            for prompt_id, group in groups.items()
            if split == "eval" or len(group) == group_size
        }
        for split, groups in members.items()
    }


def _trajectory(
    key: TaskKey,
    played: Mapping[int, list[TurnFact]],
    calls: Mapping[tuple[TaskKey, int], EnvCall],
    calibration: Calibration,
    reward: float,
) -> TracedTrajectory:
    """Seconds beyond a worker's service stay seconds of the world: they are waited for at once by all."""
    found: list[TracedTurn] = []
    for turn in range(len(played)):
        sampled = sum(part.new_tokens for part in played[turn])
        context = min(part.context_tokens for part in played[turn])
        after = min(part.context_tokens for part in played[turn + 1]) if turn + 1 < len(played) else context + sampled
        step_s, served_s = _split(calls[key, turn], calibration.env_step_s)
        found.append(TracedTurn(sampled, after - context - sampled, context, step_s, served_s))
    reset_s, reset_served_s = _split(calls[key, RESET], calibration.env_reset_s)
    reset_s = max(0.0, reset_s - calibration.constants["turn_s"])  # it was seen to end when the first turn began
    return TracedTrajectory(tuple(found), reset_s, reward, reset_served_s)


def _split(call: EnvCall, service_s: float) -> tuple[float, float]:
    """What the call takes whoever else calls, and what a worker serves."""
    if service_s and call.served:
        return call.waited_s, service_s
    return call.waited_s + call.seconds, 0.0
