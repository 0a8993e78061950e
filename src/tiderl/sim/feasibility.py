"""Runs that can never finish, found before they start: the reason in words, from the very draws that the run would use.

Refuses only what is certain: where it says nothing, a run may still give up. Knows workloads and faults, no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tiderl.data.errors import ConfigurationError
from tiderl.data.records import TaskKey
from tiderl.sim.behaviour import Behaviour
from tiderl.sim.faults.plan import ENDURABLE, FAULTS

Place = Callable[[TaskKey], tuple[Behaviour, float]]
"""Task to its workload and `env.deadline_s`."""


def check_can_finish(place: Place, *, group_size: int, groups: int) -> None:
    """`groups`: as many given up in a row end the run. Raises `ConfigurationError` when each of the first ones has a
    member that no attempt can finish: a step's seconds are the same in every attempt."""
    longest_s = 0.0
    for prompt_id in range(groups):
        members = [TaskKey("train", prompt_id, member) for member in range(group_size)]
        endless = [found for key in members if (found := _endless(key, *place(key)))]
        if not endless:
            return
        longest_s = max(longest_s, max(seconds for _, seconds in endless))
        why = endless[0][0]
    raise ConfigurationError(
        f"no group can ever finish: each of the first {groups} has a member {why}"
        + (f" (the longest: {longest_s:.3g} s)" if longest_s else ""),
        where="env",
        hint="raise env.deadline_s, or make env.wait and sim.workload milder",
    )


def _endless(key: TaskKey, workload: Behaviour, deadline_s: float) -> tuple[str, float] | None:
    """Why no attempt at the task can finish, and its longest step's seconds; None where one may."""
    profile = workload.profile
    if profile.timeout_fraction + profile.failure_fraction >= 1.0:
        return "whose every reset and step fails", 0.0
    plan = workload.plan(key)
    longest_s = max(plan.reset_s, *(turn.step_s for turn in plan.turns))
    if longest_s >= deadline_s:
        return f"with a step longer than env.deadline_s = {deadline_s:g}", longest_s
    return None


def check_faults(probabilities: Mapping[str, float]) -> None:
    """Raises `ConfigurationError` for a fault that lets nothing through, where no calm follows."""
    for name, probability in probabilities.items():
        if probability >= 1.0 and name not in ENDURABLE:
            raise ConfigurationError(
                f"{name} at every {FAULTS[name].each} lets the run never finish",
                where="sim.faults",
                hint="give a probability below 1",
            )
