"""A profile as a table: what a person reads of it."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console

from tiderl.observe.profile import render_profile


def total(wall_s: float, count: int = 10) -> dict[str, Any]:
    return {"wall_s": wall_s, "cpu_s": wall_s / 2, "count": count, "wall_ms_per_update": None}


PROFILE = {
    "updates": 4,
    "wall_s": 100.0,
    "hosts": {
        "driver": {
            "processes": 1,
            "wall_s": 100.0,
            "cpu_s": 30.0,
            "spans": {"idle": total(79.2), "send": total(20.0), "poll": total(0.4), "receive": total(0.4)},
            "beside": {"journal": total(2.0)},
        },
        "environment workers": {"processes": 3, "wall_s": 50.0, "cpu_s": 10.0, "spans": {}, "beside": {}},
    },
}


def shown(profile: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render_profile(profile))
    return console.file.getvalue()  # type: ignore[attr-defined]


def cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.strip().startswith(name))
    return re.split(r" {2,}", line.strip())


def test_each_host_has_its_spans_with_share_and_time_for_an_update() -> None:
    text = shown(PROFILE)
    assert "1:40 from the first prompt to the last of 4 updates" in text
    assert "driver (CPU 30.0%)" in text and "environment workers (CPU 20.0%, 3 processes)" in text
    assert cells(text, "send") == ["send", "20.0%", "5,000.0", "2,500.0", "2.5"]
    assert cells(text, "+ journal") == ["+ journal", "2.0%", "500.0", "250.0", "2.5"]


def test_small_spans_share_a_row() -> None:
    text = shown(PROFILE)
    assert "poll" not in text and "receive" not in text
    assert cells(text, "2 more") == ["2 more", "0.8%", "200.0", "100.0", "5.0"]


def test_without_an_update_only_shares_are_said() -> None:
    assert cells(shown({**PROFILE, "updates": 0}), "send") == ["send", "20.0%", "–", "–", "–"]
