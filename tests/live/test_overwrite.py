"""`--overwrite` replaces a run only when nobody works on it and the new one has begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiderl.api import train
from tiderl.data.errors import ConfigurationError, RunLockedError
from tiderl.store.lock import RunLock

EXAMPLE = Path(__file__).parents[2] / "examples" / "builtin.yaml"
TINY = [
    "run=r",
    "cluster.kind=inline",
    "cluster.ranks=1",
    "train.updates=1",
    "train.global_batch_groups=2",
    "algorithm.group_size=2",
    "warmup.updates=1",
    "warmup.demos=2",
    "eval.every_updates=0",
    "model.hidden=32",
]


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    train(EXAMPLE, [*TINY, "seed=5"])
    return tmp_path / "runs" / "r"


def seed_of(run: Path) -> str:
    return next(line for line in (run / "config.yaml").read_text().splitlines() if line.startswith("seed:"))


def test_a_run_that_somebody_works_on_is_not_touched(finished: Path) -> None:
    before = sorted(path.name for path in finished.iterdir())
    with RunLock(finished), pytest.raises(RunLockedError, match="is working on this run"):
        train(EXAMPLE, TINY, overwrite=True)
    assert sorted(path.name for path in finished.iterdir()) == before


def test_a_start_that_is_refused_leaves_the_old_run_in_place(finished: Path) -> None:
    with pytest.raises(ConfigurationError):
        train(EXAMPLE, [*TINY, "env.options.nonsense=1"], overwrite=True)
    assert (finished / "summary.json").is_file() and "5" in seed_of(finished)
    assert [path.name for path in finished.parent.iterdir()] == ["r"]


def test_a_run_that_began_replaces_the_old_one(finished: Path) -> None:
    assert train(EXAMPLE, [*TINY, "seed=6"], overwrite=True)["outcome"] == "done"
    assert "6" in seed_of(finished)
    assert [path.name for path in finished.parent.iterdir()] == ["r"]


def test_without_overwrite_an_existing_run_is_refused(finished: Path) -> None:
    with pytest.raises(ConfigurationError, match="this run exists"):
        train(EXAMPLE, TINY)
    assert "5" in seed_of(finished)
