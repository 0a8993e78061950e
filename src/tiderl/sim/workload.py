"""What simulated tasks do: how long they talk, how long the world takes, and whether they succeed.

Everything is a function of (workload seed, split and prompt id, member, turn), faults of the attempt too, never of call
order: the same trajectory costs the same under every strategy (I10). Lengths and seconds are lognormal around the
profile's medians; turns and success are correlated within a group. Knows no engine, clock or strategy.
"""

from __future__ import annotations

import math

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import TaskKey
from tiderl.data.settings import WaitProfile, WorkloadProfile
from tiderl.data.window import ImageWindow
from tiderl.sim.behaviour import Fault, Plan, planned
from tiderl.sim.draws import Draws, normal_cdf
from tiderl.sim.kv import Shared

_SPLITS = {"train": 0, "eval": 1, "warmup": 2}
_TURNS_PER_ATTEMPT = 1 << 20  # more than any task has: no two attempts draw the same fault


class Workload:
    """The draws of one environment's profile under one seed, cut by the run's budgets.

    Raises `ConfigurationError` when the budgets hold no first observation and one token.
    """

    def __init__(
        self,
        seed: int,
        profile: WorkloadProfile,
        *,
        max_turns: int,
        max_context_tokens: int,
        max_new_tokens_per_turn: int,
        wait: WaitProfile | None = None,
        window: ImageWindow | None = None,
    ) -> None:
        self.profile, self.wait, self.window = profile, wait, window
        self.max_turns, self.max_context_tokens = max_turns, max_context_tokens
        self.max_new_tokens_per_turn = max_new_tokens_per_turn
        self.first_observation_tokens = max(1, round(profile.first_observation_tokens))
        if self.first_observation_tokens >= max_context_tokens:
            raise ConfigurationError(
                f"the workload's first observation has {self.first_observation_tokens} tokens, the context "
                f"{max_context_tokens}",
                where="rollout.max_context_tokens",
                hint=f"give at least {self.first_observation_tokens + 1}",
            )
        self.system_tokens = min(round(profile.system_tokens), self.first_observation_tokens)
        self._weights = _shared_and_own(profile.group_correlation)
        self._action_weights = _shared_and_own(profile.action_correlation)
        self._turns = Draws(seed, "workload", "turns")
        self._success = Draws(seed, "workload", "success")
        self._actions = Draws(seed, "workload", "action")
        self._observations = Draws(seed, "workload", "observation")
        self._steps = Draws(seed, "workload", "step")
        self._resets = Draws(seed, "workload", "reset")
        self._faults = Draws(seed, "workload", "fault")
        self._waits = Draws(seed, "workload", "wait")
        self._tails = Draws(seed, "workload", "wait tail")

    def turns(self, key: TaskKey) -> int:
        """Turns until the task is over by its own rules, at least 1; budgets may end it before."""
        z = self._correlated(self._turns, key)
        return max(1, round(self.profile.turns_median * math.exp(self.profile.turns_sigma * z)))

    def succeeds(self, key: TaskKey) -> bool:
        """Whether the task is solved, if it gets as far as its own end."""
        return normal_cdf(self._correlated(self._success, key)) < self.profile.success_fraction

    def action_tokens(self, key: TaskKey, turn: int) -> int:
        """What the policy would say in the turn, stop token included, at least 1."""
        profile = self.profile
        shared, own = self._action_weights
        z = own * self._normal(self._actions, key, turn)
        if shared:
            z += shared * self._actions.normal(_group(key), -1, turn)
        return _tokens(profile.action_tokens, profile.action_sigma, z)

    def shared_prompt(self, key: TaskKey) -> Shared:
        """What the task's context begins with: the environment's own part, then all of its prompt, the same for every
        member of the group. (Name, tokens from the start on) each."""
        group = (_group(key), self.first_observation_tokens)
        return (("system", self.system_tokens), group) if self.system_tokens else (group,)

    def observation_tokens(self, key: TaskKey, turn: int) -> int:
        """What the environment answers to the turn, at least 1."""
        profile = self.profile
        z = self._normal(self._observations, key, turn)
        return _tokens(profile.observation_tokens, profile.observation_sigma, z)

    def step_s(self, key: TaskKey, turn: int) -> float:
        """Seconds that the environment takes for the turn's step, `env.wait` included."""
        profile = self.profile
        own = profile.step_s * math.exp(profile.step_sigma * self._normal(self._steps, key, turn))
        return own + self._wait_s(key, turn)

    def reset_s(self, key: TaskKey) -> float:
        profile = self.profile
        return profile.reset_s * math.exp(profile.step_sigma * self._normal(self._resets, key, 0))

    def fault(self, key: TaskKey, turn: int) -> Fault | None:
        """What goes wrong with the turn's step, -1 for the reset. Of the attempt too: a retry may fare better."""
        profile = self.profile
        if not profile.timeout_fraction and not profile.failure_fraction:
            return None
        chance = self._faults.uniform(_group(key), key.member, _TURNS_PER_ATTEMPT * key.attempt + turn)
        if chance < profile.timeout_fraction:
            return "timeout"
        return "failure" if chance < profile.timeout_fraction + profile.failure_fraction else None

    def first_tokens(self, key: TaskKey) -> int:
        """Of the first observation: all prompts have the median."""
        return self.first_observation_tokens

    def served_s(self, key: TaskKey, turn: int) -> float:
        """A profile's world answers all at once."""
        return 0.0

    def plan(self, key: TaskKey) -> Plan:
        """The trajectory that the runtime plays when every turn gets its tokens at once and nothing fails."""
        return planned(
            self,
            key,
            max_turns=self.max_turns,
            max_context_tokens=self.max_context_tokens,
            max_new_tokens_per_turn=self.max_new_tokens_per_turn,
            window=self.window,
        )

    def _wait_s(self, key: TaskKey, turn: int) -> float:
        wait = self.wait
        if wait is None:
            return 0.0
        group = _group(key)
        # One uniform decides whether it is a tail and, rescaled, how long that lasts.
        chance = self._tails.uniform(group, key.member, turn)
        if chance < wait.tail_fraction:
            shortest_s, longest_s = wait.tail_s
            return shortest_s + (longest_s - shortest_s) * chance / wait.tail_fraction
        return wait.median_s * math.exp(wait.sigma * self._waits.normal(group, key.member, turn))

    def _normal(self, draws: Draws, key: TaskKey, turn: int) -> float:
        return draws.normal(_group(key), key.member, turn)

    def _correlated(self, draws: Draws, key: TaskKey) -> float:
        """Standard normal, with correlation `group_correlation` between the members of a group."""
        group = _group(key)
        shared, own = self._weights
        return shared * draws.normal(group, -1) + own * draws.normal(group, key.member)


def _shared_and_own(correlation: float) -> tuple[float, float]:
    """Weights of two standard normals, one for the whole group, whose sum has this correlation within it."""
    return math.sqrt(correlation), math.sqrt(1.0 - correlation)


def _group(key: TaskKey) -> int:
    return 4 * key.prompt_id + _SPLITS[key.split]


def _tokens(median: float, sigma: float, z: float) -> int:
    return max(1, round(median * math.exp(sigma * z)))
