"""What the policy says in a mixture of environments: the draws of the one that a task's prompt is from.

Prompts are dealt to environments in a fixed order, so a prompt's running number says whose it is. Knows no weights and
no environments: the order comes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiderl.data.records import TaskKey
from tiderl.sim.behaviour import Behaviour
from tiderl.sim.kv import Shared


class WorkloadMixture:
    """`order`: without end, which workload the next prompt is of; the same for training and evaluation."""

    def __init__(self, workloads: Sequence[Behaviour], order: Iterator[int]) -> None:
        self._workloads, self._order = workloads, order
        self._dealt: list[int] = []

    def action_tokens(self, key: TaskKey, turn: int) -> int:
        """As `Workload.action_tokens`."""
        return self._workloads[self._environment(key)].action_tokens(key, turn)

    def shared_prompt(self, key: TaskKey) -> Shared:
        """As `Workload.shared_prompt`, the environments' own parts told apart."""
        environment = self._environment(key)
        shared = self._workloads[environment].shared_prompt(key)
        return (((environment, shared[0][0]), shared[0][1]), *shared[1:])

    def of(self, key: TaskKey) -> Behaviour:
        """The workload that the task's prompt is from."""
        return self._workloads[self._environment(key)]

    def _environment(self, key: TaskKey) -> int:
        while len(self._dealt) <= key.prompt_id:
            self._dealt.append(next(self._order))
        return self._dealt[key.prompt_id]
