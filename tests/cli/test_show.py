"""`tiderl show` over a run directory as a run leaves it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tiderl.cli.main import execute
from tiderl.data.records import TaskKey, Trajectory, TurnSpan
from tiderl.runtime.ports import PromptRow, TrajectoryRow
from tiderl.store.blobs import FileBlobs, blob_path
from tiderl.store.rundir import RunDirectory
from tiderl.store.sqlite import SqliteLedger


def trajectory(number: int) -> Trajectory:
    return Trajectory(
        id=number,
        key=TaskKey("train", 0, number),
        ids=np.arange(4, dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
        logprobs=np.array([0, 0, -1, -1], np.float32),
        versions=np.array([-1, -1, 2, 2], np.int32),
        turns=(TurnSpan(2, 4, 1.0, f"action-{number}", "stop"),),
        reward=1.0,
        success=True,
        ending="terminated",
        text=(f"observation-{number}",),
    )


async def write_run(directory: RunDirectory, members: int) -> list[str]:
    """Members 0 … members - 1 of one group, trained at update 1; one more is running."""
    directory.blobs.mkdir(parents=True)
    directory.config.write_text("seed: 0\n", encoding="utf-8")
    ledger, blobs = SqliteLedger(directory.journal), FileBlobs(directory.blobs)
    sha256s = [await blobs.put(trajectory(number)) for number in range(members)]
    ledger.append([PromptRow(0, "task", 0, 2)])
    ledger.append([TrajectoryRow(n, 0, n, 0, "ready", sha256=sha256) for n, sha256 in enumerate(sha256s)])
    ledger.append([TrajectoryRow(members, 0, members, 0, "running")])
    await ledger.commit(1, list(range(members)))
    await ledger.close()
    return sha256s


def test_the_newest_transcripts_come_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(write_run(RunDirectory(tmp_path / "run"), 4))
    assert execute(["show", str(tmp_path / "run"), "--last", "2"]) == 0
    text = capsys.readouterr().out
    assert "action-1" not in text and text.index("action-2") < text.index("action-3")
    assert text.count("trained at update 1") == 2 and "observation-3" in text


def test_payloads_that_are_no_longer_kept_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory(tmp_path / "run")
    sha256s = asyncio.run(write_run(directory, 3))
    for sha256 in sha256s[2:]:
        (directory.blobs / blob_path(sha256)).unlink()
    assert execute(["show", str(directory.root), "--last", "1"]) == 0
    assert "action-1" in capsys.readouterr().out
    for sha256 in sha256s[:2]:
        (directory.blobs / blob_path(sha256)).unlink()
    assert execute(["show", str(directory.root)]) == 0
    assert "no longer kept" in capsys.readouterr().out


def test_a_damaged_journal_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory(tmp_path / "run")
    asyncio.run(write_run(directory, 1))
    directory.journal.write_bytes(b"no database at all, " * 100)
    assert execute(["show", str(directory.root)]) == 1
    said = capsys.readouterr()
    assert "cannot be read" in said.err and len(said.err.splitlines()) == 1
