"""`tiderl sim FILE --swarm N --seed S` as a user meets it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import typer

from tiderl.cli.main import execute
from tiderl.cli.swarm import run_swarm
from tiderl.data.errors import RunStopped
from tiderl.runtime.run import Loops, Run
from tiderl.sim.faults.plan import FAULTS

BUILTIN = str(Path(__file__).parents[2] / "examples" / "builtin.yaml")
RUNS_OF_SEEDS_3_AND_4 = 4
"""Each undisturbed and then under faults that end no driver."""
Capture = pytest.CaptureFixture[str]


def test_a_swarm_tells_what_it_ran(capsys: Capture) -> None:
    assert execute(["sim", BUILTIN, "--swarm", "3", "--seed", "7"]) == 0
    assert "3 seeds from 7, 0 failed" in capsys.readouterr().out


def test_json_is_one_object_and_the_same_twice(capsys: Capture) -> None:
    found = []
    for _ in range(2):
        assert execute(["sim", BUILTIN, "--swarm", "2", "--seed", "4", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert (found[0]["seeds"], found[0]["first_seed"], found[0]["violations"]) == (2, 4, [])
    assert list(found[0]["faults"]) == list(FAULTS)
    assert len(set(found[0]["log_sha256"])) == 2


def test_a_fault_that_no_instance_can_have_is_said(capsys: Capture) -> None:
    faults = "sim.faults={crash_at_pause: 0.1, engine_crash: 0.01}"
    assert execute(["sim", BUILTIN, "-o", "rollout.kv_policy=lru", "-o", faults, "--swarm", "1"]) == 0
    shown = capsys.readouterr().out
    assert "note: sim.faults.crash_at_pause has no effect: no instance of this file can have it" in shown
    assert "sim.faults.engine_crash" not in shown
    assert execute(["sim", BUILTIN, "-o", faults, "--swarm", "1"]) == 0
    assert "no effect" not in capsys.readouterr().out


class NeverConsumes(Run):
    """A runtime whose trainer never finds a batch."""

    def _build(self, *arguments: Any) -> Loops:
        loops = super()._build(*arguments)
        loops.training._available = list  # type: ignore[method-assign]
        return loops


def test_a_seed_that_fails_is_told_with_its_command_and_code_1(capsys: Capture) -> None:
    with pytest.raises(typer.Exit) as stopped:
        run_swarm(Path(BUILTIN), ["train.updates=5"], 1, 3, False, make_run=NeverConsumes)
    assert stopped.value.exit_code == 1
    output = capsys.readouterr()
    assert "seed 3 failed:" in output.err
    assert "DeadlockError" in output.err
    assert f"again: tiderl sim {BUILTIN} -o train.updates=5 --swarm 1 --seed 3" in output.out


def test_ctrl_c_in_a_swarm_says_how_far_it_came() -> None:
    runs = itertools.count()

    def make_run(*arguments: Any, **options: Any) -> Run:
        if next(runs) == RUNS_OF_SEEDS_3_AND_4:
            raise KeyboardInterrupt
        return Run(*arguments, **options)

    with pytest.raises(RunStopped, match="stopped after 2 of 9 seeds, 0 failed") as stopped:
        run_swarm(Path(BUILTIN), ["sim.faults={env_slow: 0.1}"], 9, 3, True, make_run=make_run)
    assert stopped.value.hint == "the next one is --seed 5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--swarm", "2", "--save", "x"], "--save and --dry-run do not go with --swarm"),
        (["--swarm", "2", "--dry-run"], "--save and --dry-run do not go with --swarm"),
        (["--seed", "2"], "--seed goes with --swarm"),
        (["--swarm", "0"], "'--swarm'"),
        (["--swarm", "1", "-o", "sim.faults={no: 1}"], "no fault"),
    ],
)
def test_a_mistake_is_two_lines_and_code_2(arguments: list[str], message: str, capsys: Capture) -> None:
    assert execute(["sim", BUILTIN, *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "Traceback" not in output.err
