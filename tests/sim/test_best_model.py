"""The best model so far: which version is kept, over ties, faults, resumes and kills. On files, and in the runtime."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.virtual_runs import VirtualRun, virtual_run

from tiderl.data.errors import CheckpointError
from tiderl.data.events import EvalFinished, Fault, VersionPublished
from tiderl.data.records import WeightHandle
from tiderl.runtime.ports import Ports
from tiderl.store.models import FileModels


def models(folder: Path) -> FileModels:
    return FileModels(folder / "model-best", folder / "model-candidates")


def save(kept: FileModels, version: int) -> None:
    """As the trainer's rank does."""
    folder = Path(kept.path(version))
    folder.mkdir(parents=True)
    (folder / "weights").write_text(str(version), encoding="utf-8")


def best(folder: Path) -> tuple[str, int]:
    verdict = json.loads((folder / "model-best" / "evaluation.json").read_text(encoding="utf-8"))
    return (folder / "model-best" / "weights").read_text(encoding="utf-8"), verdict["version"]


def test_the_best_stays_and_of_equals_the_earlier(tmp_path: Path) -> None:
    kept = models(tmp_path)
    for version, successes, now in ((0, 5, 0), (10, 4, 0), (20, 7, 20), (30, 7, 20), (40, 8, 40)):
        save(kept, version)
        kept.judge(version, successes, 10)
        assert best(tmp_path) == (str(now), now)
        assert not Path(kept.path(version)).exists()


def test_an_evaluation_that_lost_every_episode_or_has_no_candidate_changes_nothing(tmp_path: Path) -> None:
    kept = models(tmp_path)
    save(kept, 0)
    kept.judge(0, 0, 0)
    kept.judge(10, 9, 10)
    assert not (tmp_path / "model-best").exists()


def test_a_resumed_run_goes_on_from_the_best_before_and_drops_what_waited(tmp_path: Path) -> None:
    first = models(tmp_path)
    for version in (0, 10):
        save(first, version)
    first.judge(0, 6, 10)
    again = models(tmp_path)  # killed before version 10 was judged
    assert not (tmp_path / "model-candidates").exists()
    save(again, 20)
    again.judge(20, 6, 10)
    assert best(tmp_path) == ("0", 0)


def test_a_kill_between_the_two_renames_loses_no_best(tmp_path: Path) -> None:
    kept = models(tmp_path)
    save(kept, 0)
    kept.judge(0, 6, 10)
    (tmp_path / "model-best").rename(tmp_path / ".model-best.replaced")
    models(tmp_path)
    assert best(tmp_path) == ("0", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["model-best"]


@dataclass
class Notes:
    """A Models port that writes down what it is asked; `full`: the disk refuses every judgement."""

    full: bool = False
    judged: list[tuple[int, int, int]] = field(default_factory=list)

    def path(self, version: int) -> str:
        return f"v{version}"

    def judge(self, version: int, successes: int, prompts: int) -> None:
        self.judged.append((version, successes, prompts))
        if self.full:
            raise CheckpointError("no space left")


class WatchedUpdate:
    """An Update port that notes how many versions were exported before each saved model; `full`: nothing is saved."""

    def __init__(self, inner: Any, *, full: bool = False) -> None:
        self._inner, self._full = inner, full
        self.exported = 0
        self.saved: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def export(self, version: int) -> WeightHandle:
        self.exported += 1
        return await self._inner.export(version)

    async def save_model(self, directory: str) -> None:
        if self._full:
            raise CheckpointError("no space left")
        self.saved.append((directory, self.exported))
        await self._inner.save_model(directory)


def watched(notes: Notes, overrides: list[str], *, full: bool = False) -> tuple[VirtualRun, WatchedUpdate]:
    def change(ports: Ports) -> None:
        ports.models = notes
        ports.cluster.update = WatchedUpdate(ports.cluster.update, full=full)  # type: ignore[misc, assignment]

    run = virtual_run(overrides, change=change)
    return run, run.ports.cluster.update  # type: ignore[return-value]


def test_every_evaluated_version_is_saved_while_the_trainer_holds_it_and_judged_once() -> None:
    notes = Notes()
    run, update = watched(notes, ["train.updates=6", "eval.every_updates=3"])
    # Version v is the trainer's state between the exports of v - 1 and v.
    assert update.saved == [("v0", 0), ("v3", 3), ("v6", 6)]
    assert notes.judged == [(e.version, e.successes, e.prompts) for e in run.log.of(EvalFinished)]
    assert len(run.log.of(VersionPublished)) == 7


@pytest.mark.parametrize("where", ["save", "judge"])
def test_a_full_disk_costs_the_best_model_not_the_run(where: str) -> None:
    overrides = ["train.updates=3", "eval.every_updates=3"]
    run, _ = watched(Notes(full=where == "judge"), overrides, full=where == "save")
    assert run.outcome.outcome == "done"
    assert [fault.what for fault in run.log.of(Fault) if fault.where == "best model"] == ["CheckpointError"] * 2
