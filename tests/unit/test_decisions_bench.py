"""bench/decisions.py: its short form, and that its worlds are what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from decisions import figures, measured  # noqa: E402


def test_the_short_form_checks_the_books() -> None:
    done = subprocess.run(
        [sys.executable, BENCH / "decisions.py", "--short", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"checked": True}


def test_a_pressed_pool_makes_every_sort_of_decision_and_a_free_one_lets_all_run() -> None:
    pressed, free = (measured(60, 3000, 0, pressed=pressed) for pressed in (True, False))
    assert set(pressed) == {
        *("admission", "ask, KV leaves", "ask, room", "ask, waits"),
        *("ended and pump", "leave and pump", "when is KV due"),
    }
    assert set(free) == set(pressed) - {"ask, KV leaves", "ask, waits"}
    assert (
        sum(len(us) for sort, us in pressed.items() if sort.startswith("ask")) + len(pressed["ended and pump"]) == 3000
    ), "every event is one of them"


def test_rows_say_what_was_measured() -> None:
    rows = figures(40, 200, 1, pressed=False)
    assert {row["decision"] for row in rows} >= {"admission", "ask, room", "ended and pump"}
    assert all(0.0 < row["median_us"] <= row["p99_us"] and row["within"] for row in rows)
