"""`tiderl sim FILE --swarm N --seed S` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from tiderl.cli.main import execute
from tiderl.cli.swarm import run_swarm
from tiderl.runtime.run import Loops, Run
from tiderl.sim.faults.plan import FAULTS

BUILTIN = str(Path(__file__).parents[2] / "examples" / "builtin.yaml")
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
