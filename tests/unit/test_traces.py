"""Traces: real files are read whole, bad ones are refused with their line, the fit is the file's own statistics."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tiderl.data.errors import ConfigurationError
from tiderl.sim.traces import fitted_profile, read_trace

TRACES = Path(__file__).resolve().parents[2] / "examples" / "sim" / "traces"
HEAD = "traj,turn,output_tokens,obs_tokens,step_s\n"


def written(folder: Path, text: str) -> Path:
    file = folder / "trace.csv"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("name", "trajectories", "turns"),
    [("tau_airline_gpt4o", 200, 2_454), ("web_miniwob_measured", 168, 366)],
)
def test_a_real_trace_is_read_whole(name: str, trajectories: int, turns: int) -> None:
    trace = read_trace(TRACES / f"{name}.csv")
    assert len(trace) == trajectories
    assert sum(len(trajectory.turns) for trajectory in trace) == turns


def test_turns_of_mixed_trajectories_find_their_own(tmp_path: Path) -> None:
    rows = "7,0,3,10,0.5\n2,0,4,11,\n7,1,5,12,0.25\n"
    seven, two = read_trace(written(tmp_path, HEAD + rows))
    assert [turn.sampled_tokens for turn in seven.turns] == [3, 5]
    assert [turn.step_s for turn in seven.turns] == [0.5, 0.25]
    assert two.turns[0].observed_tokens == 11 and two.turns[0].step_s is None


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    (only,) = read_trace(written(tmp_path, "\ufeff" + HEAD + "0,0,3,,\n"))
    assert (only.turns[0].sampled_tokens, only.turns[0].observed_tokens) == (3, 0)


def test_the_fit_is_the_median_and_the_deviation_of_the_logarithm(tmp_path: Path) -> None:
    rows = "0,0,10,100,1\n1,0,20,100,1\n1,1,40,100,4\n"
    profile = fitted_profile(read_trace(written(tmp_path, HEAD + rows)))
    assert profile.action_tokens == 20
    # Logarithms of 10, 20 and 40 are -ln 2, 0, ln 2 around that of 20.
    assert profile.action_sigma == pytest.approx(math.log(2) * math.sqrt(2 / 3))
    assert profile.turns_median == 1.5 and profile.step_s == 1
    assert profile.observation_sigma == 0


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("", "empty", ""),
        (HEAD, "no turns", ""),
        ("traj,turn,obs_tokens\n0,0,1\n", "no column output_tokens", ":1"),
        ("turn,output_tokens,obs_tokens\n0,1,1\n", "no column traj", ":1"),
        (HEAD + "0,0,1,1,-0.5\n", "step_s must be a number of at least 0, given '-0.5'", ":2"),
        (HEAD + "0,0,1,1,nan\n", "given 'nan'", ":2"),
        (HEAD + "0,0,1,1,inf\n", "given 'inf'", ":2"),
        (HEAD + "0,0,1,1,soon\n", "given 'soon'", ":2"),
        (HEAD + "0,0,1,1,1\n0,2,1,1,1\n", "turn 2 of trajectory 0 comes where 1 belongs", ":3"),
        (HEAD + "0,1,1,1,1\n0,0,1,1,1\n", "turn 1 of trajectory 0 comes where 0 belongs", ":2"),
        (HEAD + "0.5,0,1,1,1\n", "traj must be a whole number", ":2"),
        (HEAD + ",0,1,1,1\n", "traj must be a whole number", ":2"),
        (HEAD + "0,0,-3,1,1\n", "output_tokens", ":2"),
        (HEAD + "0,0,,1,1\n", "output_tokens must be a whole number, not blank", ":2"),
        (HEAD + "0,0,3,1,1\n0,1,2.5,1,1\n", "output_tokens must be a whole number", ":3"),
        (HEAD + "0,0,3,1.5,1\n", "obs_tokens must be a whole number", ":2"),
        (HEAD + "0,0,3\n", "fewer cells", ":2"),
        (HEAD + "0,0,3,1,1,9\n", "more cells", ":2"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, what: str, line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_trace(written(tmp_path, text))
    assert what in str(caught.value)
    assert f"trace.csv{line}" in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_trace(tmp_path / "binary.csv")
