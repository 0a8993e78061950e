"""The audit passes a right journal and names the fault of each broken one (I1, I2)."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tiderl.data.records import TaskKey, Trajectory, TurnSpan
from tiderl.runtime.ports import CheckpointRow, PromptRow, TrajectoryRow, VersionRow
from tiderl.store.audit import audit
from tiderl.store.blobs import FileBlobs, blob_path
from tiderl.store.sqlite import SqliteLedger


def trajectory(number: int) -> Trajectory:
    return Trajectory(
        id=number,
        key=TaskKey("train", number // 2, number % 2),
        ids=np.arange(6, dtype=np.int32),
        loss_mask=np.arange(6) > 3,
        logprobs=np.zeros(6, np.float32),
        versions=np.full(6, -1, np.int32),
        turns=(TurnSpan(4, 6, 1.0, "go", "stop"),),
        reward=1.0,
        success=True,
        ending="terminated",
    )


async def write_run(folder: Path) -> None:
    """Prompts 0, 1, 2 of two members: 0 and 1 trained, one trajectory dropped and refilled, one ready, one running."""
    blobs = FileBlobs(folder / "blobs")
    ledger = SqliteLedger(folder / "journal.sqlite", threaded=False)
    ledger.append([PromptRow(number, f"task-{number}", number, 0) for number in range(3)])
    ledger.append([VersionRow(0, 0)])
    for number in range(5):
        sha256 = await blobs.put(trajectory(number))
        ledger.append([TrajectoryRow(number, number // 2, number % 2, 0, "ready", sha256=sha256)])
    ledger.append([TrajectoryRow(5, 2, 1, 0, "dropped", reason="environment_fault")])
    ledger.append([TrajectoryRow(6, 2, 1, 1, "running")])
    await ledger.commit(1, [0, 1])
    ledger.append([VersionRow(1, 1)])
    await ledger.commit(2, [3, 2])
    await ledger.durable(CheckpointRow("checkpoints/000002", 2))
    await ledger.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    asyncio.run(write_run(tmp_path))
    return tmp_path


def break_journal(run: Path, *statements: str) -> list[str]:
    db = sqlite3.connect(run / "journal.sqlite", isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.close()
    return audit(run / "journal.sqlite", run / "blobs")


def test_right_journal_has_no_violations(run: Path) -> None:
    assert audit(run / "journal.sqlite", run / "blobs") == []


UPDATE_1, UPDATE_2 = (f"UPDATE updates SET trajectory_ids='{{}}' WHERE update_no={n}" for n in (1, 2))

BROKEN = {
    "two_updates": (
        [UPDATE_2.format("[3, 2, 0]")],
        "0 is trained in update 1 and in 2",
    ),
    "twice_in_one": (
        [UPDATE_1.format("[0, 1, 1]")],
        "1 is trained in update 1 and in 1",
    ),
    "row_forgot": (
        ["UPDATE trajectories SET status='ready', update_no=NULL WHERE id=0"],
        "update 1 trained trajectory 0, whose row says ready",
    ),
    "row_names_other_update": (["UPDATE trajectories SET update_no=2 WHERE id=0"], "whose row says trained in 2"),
    "update_forgot": ([UPDATE_1.format("[0]")], "1 is trained in update 1, which"),
    "update_vanished": (["DELETE FROM updates WHERE update_no=1"], "trained in update 1, which does not name it"),
    "unknown_trajectory": (["DELETE FROM trajectories WHERE id=0"], "trajectory 0, which was never issued"),
    "hole_in_prompts": (["DELETE FROM prompts WHERE prompt_id=1"], "prompt ids have holes: [1]"),
    "orphan": (["DELETE FROM prompts WHERE prompt_id=2"], "belongs to prompt 2, which was never issued"),
    "dropped_without_reason": (["UPDATE trajectories SET reason=NULL WHERE id=5"], "5 is dropped with reason None"),
    "reason_without_drop": (["UPDATE trajectories SET reason='x' WHERE id=4"], "4 is ready with reason 'x'"),
    "ready_with_update": (["UPDATE trajectories SET update_no=1 WHERE id=4"], "4 is ready with update 1"),
    "no_payload": (["UPDATE trajectories SET sha256=NULL WHERE id=4"], "4 is ready without a payload"),
    "member_twice": (
        ["INSERT INTO trajectories VALUES(7, 0, 0, 1, 'running', NULL, NULL, NULL, NULL)"],
        "member 0 of prompt 0 has 2 trajectories",
    ),
    "version_before_commit": (["INSERT INTO versions VALUES(3, 3)"], "without the commit of update 3"),
    "version_of_other_update": (["UPDATE versions SET update_no=2 WHERE version=1"], "made by update 2"),
    "checkpoint_ahead": (["INSERT INTO checkpoints VALUES('c9', 9)"], "c9 holds update 9, which is not committed"),
    "two_models": (
        [
            "CREATE TABLE other AS SELECT * FROM versions",
            "DROP TABLE versions",
            "ALTER TABLE other RENAME TO versions",
            "INSERT INTO versions VALUES(1, 1)",
        ],
        "version 1 names 2 models",
    ),
    "two_rows": (
        [
            "CREATE TABLE other AS SELECT * FROM trajectories",
            "DROP TABLE trajectories",
            "ALTER TABLE other RENAME TO trajectories",
            "INSERT INTO trajectories SELECT * FROM trajectories WHERE id=4",
        ],
        "trajectory 4 has 2 rows",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_journal_is_caught(run: Path, name: str) -> None:
    statements, complaint = BROKEN[name]
    violations = break_journal(run, *statements)
    assert any(complaint in line for line in violations), violations


def test_changed_payload_is_caught(run: Path) -> None:
    db = sqlite3.connect(run / "journal.sqlite")
    (sha256,) = db.execute("SELECT sha256 FROM trajectories WHERE id=4").fetchone()
    db.close()
    path = run / "blobs" / blob_path(sha256)
    path.write_bytes(path.read_bytes() + b"x")
    assert any("payload of trajectory 4" in line for line in audit(run / "journal.sqlite", run / "blobs"))


def test_deleted_payload_is_allowed(run: Path) -> None:
    for path in (run / "blobs").rglob("*.safetensors"):
        path.unlink()
    assert audit(run / "journal.sqlite", run / "blobs") == []


def test_a_person_can_run_it(run: Path) -> None:
    command = [sys.executable, "-m", "tiderl.store.audit", str(run)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "I1 and I2 hold\n"
    break_journal(run, "DELETE FROM prompts WHERE prompt_id=1")
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == 1


def test_a_journal_that_is_none_is_refused_in_two_lines(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"no database" * 100)
    done = subprocess.run(
        [sys.executable, "-m", "tiderl.store.audit", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "cannot be read as a journal" in done.stderr and len(done.stderr.splitlines()) == 2
