"""The engine's benchmark in its short form: numbers are right, the KV of agents is reused; speed is not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "engine.py"


@pytest.mark.live
def test_the_short_bench_finds_right_numbers_and_kept_kv() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--short"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert sorted(found) == ["small", "tiny"]
    for figures in found.values():
        assert 0.0 < figures["logprob_gap"] <= 1e-5
        assert 0.95 <= figures["agents"]["cached_fraction_of_old_context"] <= 1.0
        # Each member computes the last id of the prompt itself; the rest of it is computed once for the group.
        assert 1.0 <= figures["agents"]["prompt_prefills_per_group"] < 1.1
