"""ρ of a run on real time: between 0 and 1, from its own record; none where there is no bound."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.kills import TINY

from tiderl.api import train

pytestmark = pytest.mark.live

FIGURES = ("bound_tokens_per_s", "rho", "rho_order", "binding")
INLINE = ("cluster.kind=inline", "cluster.ranks=1", "eval.every_updates=0", "train.updates=4", "warmup.updates=2")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("k.yaml").write_text(TINY, encoding="utf-8")


@pytest.mark.parametrize("strategy", ["sync", "areal"])
def test_a_run_is_no_faster_than_its_bound(strategy: str) -> None:
    result = train("k.yaml", [*INLINE, f"schedule.strategy={strategy}"])
    assert 0 < result["rho"] <= result["rho_order"] <= 1
    assert result["rho"] == pytest.approx(result["goodput_tokens_per_s"] / result["bound_tokens_per_s"])
    assert isinstance(result["binding"], str)


def test_under_window_there_is_no_bound() -> None:
    result = train("k.yaml", [*INLINE, "schedule.strategy=areal", "schedule.staleness_counts=window"])
    assert [result[name] for name in FIGURES] == [None] * 4


def test_with_waits_that_dominate_the_bound_is_close_to_what_they_allow() -> None:
    """Waits of 0.3 s a step leave little else: `sync` on its own waits is bound by its longest trajectories."""
    slow = "env.wait={kind: lognormal, median_s: 0.3, sigma: 0.1}"
    result = train("k.yaml", [*INLINE, "schedule.strategy=sync", slow])
    assert result["binding"] == "critical_path"
    assert result["rho_order"] > 0.5
