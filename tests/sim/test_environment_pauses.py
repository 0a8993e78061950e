"""Tasks that wait for room under `ctb` pause their environments: in pairs, over faults; a wrong runtime is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiderl.api.swarm import swarm
from tiderl.runtime.ports import EnvironmentHandle
from tiderl.runtime.run import Loops, Run
from tiderl.sim.swarm import SeedReport

BUILTIN = Path(__file__).parents[2] / "examples" / "builtin.yaml"
SEEDS = 12
"""Within so many instances some have a KV budget so small that tasks wait."""
PAUSES, CLOSED = "an environment pauses", "an environment closed while it is paused"


def reports(faults: str, make_run: Callable[..., Run] = Run) -> list[SeedReport]:
    return swarm(BUILTIN, range(SEEDS), [f"sim.faults={faults}", "rollout.kv_policy=ctb"], make_run=make_run).seeds


def test_without_faults_every_pause_is_resumed() -> None:
    found = reports("{}")
    assert [report.violations for report in found] == [()] * SEEDS
    assert sum(report.seen.get(PAUSES, 0) for report in found) > 0
    assert sum(report.seen.get(CLOSED, 0) for report in found) == 0


def test_a_pause_that_fails_ends_its_task_and_nothing_else() -> None:
    found = reports("{env_pause_fails: 0.2}")
    assert [report.violations for report in found] == [()] * SEEDS
    for report in found:
        fired = report.fired.get("env_pause_fails", 0)
        assert report.seen.get("dropped: environment_raised", 0) <= fired
        assert report.seen.get(CLOSED, 0) == fired  # none of them is asked for anything more
    assert sum(report.fired.get("env_pause_fails", 0) for report in found) > 0


class Deaf:
    """A handle as a seat sees it, which passes on all but one call."""

    def __init__(self, handle: EnvironmentHandle, lost: str) -> None:
        self._handle, self._lost = handle, lost

    async def pause(self) -> None:
        if self._lost != "pause":
            await self._handle.pause()

    async def resume(self) -> None:
        if self._lost != "resume":
            await self._handle.resume()


class ForgetsOne(Run):
    """Leaves out one of the two calls."""

    lost = ""

    def _build(self, *arguments: object) -> Loops:
        loops = super()._build(*arguments)  # type: ignore[arg-type]
        seats = loops.rollout.kv._seats  # type: ignore[attr-defined]
        enter = seats.enter

        async def deaf(seat: Any, context_tokens: int, new_tokens: int, handle: EnvironmentHandle, ids: Any) -> None:
            await enter(seat, context_tokens, new_tokens, Deaf(handle, self.lost), ids)

        seats.enter = deaf
        return loops


class ForgetsPause(ForgetsOne):
    lost = "pause"


class ForgetsResume(ForgetsOne):
    lost = "resume"


MUTANTS = [(ForgetsPause, "resume of train/", "which is not paused"), (ForgetsResume, "step of ", "which is paused")]


@pytest.mark.parametrize(("mutant", "call", "words"), MUTANTS, ids=[mutant[0].__name__ for mutant in MUTANTS])
def test_a_runtime_that_forgets_one_of_them_is_found(mutant: type[Run], call: str, words: str) -> None:
    told = [what for report in reports("{}", mutant) for what in report.violations]
    assert any(call in what and words in what for what in told)
