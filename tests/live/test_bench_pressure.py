"""The bench of the engine's admission and chunks: whatever the setting, turns sample the same ids."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "pressure.py"


@pytest.mark.live
def test_the_short_form_finds_equal_ids() -> None:
    done = subprocess.run([sys.executable, str(BENCH), "--short"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"figures": {}, "ids_equal": True}
