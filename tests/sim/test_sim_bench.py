"""bench/sim.py in its short form: the whole simulator twice, one log; no figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_the_speed_bench_runs_and_both_rounds_write_the_same_log() -> None:
    config = Path(__file__).parents[2] / "examples" / "builtin.yaml"
    command = [sys.executable, str(BENCH / "sim.py"), "--short", "--json", "--config", str(config)]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [run["ranks"] for run in answer["runs"]] == [4, 8]
    assert all(run["turns"] > 0 and run["turns_per_s"] > 0 for run in answer["runs"])
    assert answer["peak_bytes"] > 1 << 20
