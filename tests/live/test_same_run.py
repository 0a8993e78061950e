"""What is promised about equal runs on one machine: inline with one rank, a seed gives the same run bit for bit; and a
run that dies between updates, where nothing in flight is lost, ends with the weights of one that nobody disturbed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.kills import TINY

from tiderl.api import resume, train
from tiderl.api.result import Result
from tiderl.data.events import Event, UpdateCommitted, VersionPublished
from tiderl.store.audit import audit

pytestmark = pytest.mark.live

INLINE = ("cluster.kind=inline", "cluster.ranks=1", "train.updates=6")
SYNC = (*INLINE, "schedule.strategy=sync", "eval.every_updates=0")


class Killed(BaseException):
    """The process is gone: nothing may catch this."""


class DiesAt:
    """An observer that ends the process, as far as the run can tell, at the first event of this kind and number."""

    def __init__(self, kind: type[Event], **fields: int) -> None:
        self.kind, self.fields = kind, fields

    def observe(self, event: Event) -> None:
        if isinstance(event, self.kind) and all(getattr(event, name) == value for name, value in self.fields.items()):
            raise Killed

    def recall(self, event: Event) -> None: ...
    def note(self, text: str) -> None: ...


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("k.yaml").write_text(TINY)
    return "k.yaml"


def trained(config: str, name: str, overrides: Sequence[str]) -> Result:
    return train(config, [f"run={name}", *overrides])


def weights(name: str) -> dict[str, np.ndarray]:
    return load_file(f"runs/{name}/model/model.safetensors")


def journal(name: str, *tables: str) -> list[list[tuple]]:
    db = sqlite3.connect(f"runs/{name}/journal.sqlite")
    try:
        return [db.execute(f"SELECT * FROM {table}").fetchall() for table in tables]
    finally:
        db.close()


def updates(name: str) -> list[dict]:
    rows = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "update"]


def test_inline_with_one_rank_a_seed_gives_the_same_run(config: str) -> None:
    """Ids, payload hashes, batches and weights; only when `auto` writes a checkpoint depends on the machine's speed."""
    for name in ("a", "b"):
        assert trained(config, name, [*INLINE, "checkpoint.every_updates=2"])["updates"] == 6
    tables = ("prompts", "trajectories", "updates", "versions", "checkpoints")
    assert journal("a", *tables) == journal("b", *tables)
    first, second = weights("a"), weights("b")
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


def test_another_seed_gives_another_run(config: str) -> None:
    trained(config, "a", INLINE)
    trained(config, "b", [*INLINE, "seed=1"])
    assert journal("a", "trajectories") != journal("b", "trajectories")


@pytest.mark.parametrize(
    ("kind", "fields", "every"),
    [
        (UpdateCommitted, {"update": 3}, 1),  # committed, neither published nor durable: one update is redone
        (UpdateCommitted, {"update": 5}, 3),  # two updates are redone
        (VersionPublished, {"version": 4}, 1),  # published, not durable
    ],
    ids=["one redone", "two redone", "published"],
)
def test_a_run_killed_between_updates_ends_as_an_undisturbed_one(
    kind: type[Event], fields: dict[str, int], every: int, config: str
) -> None:
    overrides = [*SYNC, f"checkpoint.every_updates={every}"]
    trained(config, "whole", overrides)
    with pytest.raises(Killed):
        train(config, ["run=killed", *overrides], observer=DiesAt(kind, **fields))
    assert resume("killed")["outcome"] == "done"
    assert audit("runs/killed/journal.sqlite", "runs/killed/blobs") == []
    assert journal("killed", "trajectories") == journal("whole", "trajectories"), "nothing was in flight"
    expected, found = weights("whole"), weights("killed")
    assert any(row["reward_mean"] not in (0.0, None) for row in updates("whole")), "without reward nothing is learned"
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-7, err_msg=name)
