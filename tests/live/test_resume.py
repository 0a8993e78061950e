"""`--resume` of everything that a run directory can be: what goes on, what is refused and how it is said, what is lost.

Runs are inline, so that a stage takes a second; `test_kills.py` does the same with processes and kill -9.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.kills import TINY

from tiderl.api import resume, train
from tiderl.cli.main import execute
from tiderl.data.errors import CheckpointError
from tiderl.data.events import Event, RunStarted, UpdateCommitted
from tiderl.store.audit import audit
from tiderl.store.lock import RunLock

pytestmark = pytest.mark.live

RUN = Path("runs/k")
INLINE = ("run=k", "cluster.kind=inline", "cluster.ranks=1", "train.updates=6", "checkpoint.every_updates=2")
Capture = pytest.CaptureFixture[str]


class Killed(BaseException):
    """The process is gone: nothing may catch this."""


class At:
    """An observer that does something when an event of this kind comes for which `when` holds."""

    def __init__(self, kind: type[Event], do: Callable[[Event], None]) -> None:
        self.kind, self.do = kind, do

    def observe(self, event: Event) -> None:
        if isinstance(event, self.kind):
            self.do(event)

    def recall(self, event: Event) -> None: ...
    def note(self, text: str) -> None: ...


def die(event: Event) -> None:
    raise Killed


def die_after(update: int) -> At:
    def do(event: Event) -> None:
        if getattr(event, "update", -1) == update:
            raise Killed

    return At(UpdateCommitted, do)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("k.yaml").write_text(TINY)


def killed(observer: At) -> Path:
    """A run that died there."""
    with pytest.raises(Killed):
        train("k.yaml", INLINE, observer=observer)
    return RUN


def finished() -> Path:
    train("k.yaml", INLINE)
    return RUN


def resumed(capsys: Capture, *arguments: str, run: Path = RUN) -> tuple[int, str]:
    """Exit code and stderr of the command."""
    capsys.readouterr()
    code = execute(["train", "--resume", str(run), *arguments])
    return code, capsys.readouterr().err


def expect_whole(run: Path = RUN, updates: int = 6) -> None:
    assert audit(run / "journal.sqlite", run / "blobs") == []
    db = sqlite3.connect(run / "journal.sqlite")
    assert db.execute("SELECT count(*) FROM updates").fetchone() == (updates,)
    assert db.execute("SELECT count(*) FROM trajectories WHERE status = 'trained'").fetchone() == (updates * 16,)
    db.close()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["outcome"], summary["updates"]) == ("done", updates)


# --- what is refused, in one or two lines


def nothing_there() -> tuple[str, ...]:
    return ()


def another_learning_rate() -> tuple[str, ...]:
    killed(die_after(3))
    return ("-o", "train.lr=0.1")


def an_edited_configuration() -> tuple[str, ...]:
    config = killed(die_after(3)) / "config.yaml"
    config.write_text(config.read_text().replace("group_size: 4", "group_size: 2"))
    return ()


def a_journal_of_a_newer_version() -> tuple[str, ...]:
    db = sqlite3.connect(killed(die_after(3)) / "journal.sqlite", isolation_level=None)
    db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    db.close()
    return ()


def a_journal_that_is_none() -> tuple[str, ...]:
    run = killed(die_after(3))
    (run / "journal.sqlite").write_bytes(b"something else entirely, and long enough to be looked at" * 100)
    return ()


def no_whole_checkpoint() -> tuple[str, ...]:
    for folder in (killed(die_after(3)) / "checkpoints").iterdir():
        (folder / "state.json").unlink()
    return ()


def only_damaged_checkpoints() -> tuple[str, ...]:
    for folder in (killed(die_after(3)) / "checkpoints").iterdir():
        (folder / "weights.safetensors").write_bytes(b"torn")
    return ()


def a_lost_payload_of_a_committed_update() -> tuple[str, ...]:
    run = killed(die_after(3))  # update 3 is committed and in no checkpoint
    db = sqlite3.connect(run / "journal.sqlite")
    (sha256,) = db.execute("SELECT sha256 FROM trajectories WHERE update_no = 3").fetchone()
    db.close()
    next((run / "blobs").rglob(f"{sha256}*")).unlink()
    return ()


@pytest.mark.parametrize(
    ("prepare", "code", "said"),
    [
        (nothing_there, 2, ["no such run", "runs/k"]),
        (another_learning_rate, 2, ["train.lr may not change", "what may: train.updates, eval"]),
        (an_edited_configuration, 2, ["algorithm.group_size was 4 and is 2", "config.yaml"]),
        (a_journal_of_a_newer_version, 1, ["the journal has schema 99, this TideRL knows up to 2", "update TideRL"]),
        (a_journal_that_is_none, 1, ["the journal cannot be used", "journal.sqlite"]),
        (no_whole_checkpoint, 1, ["no checkpoint of this run is whole", "--overwrite"]),
        (only_damaged_checkpoints, 1, ["no checkpoint of this run can be read", "--overwrite"]),
        (a_lost_payload_of_a_committed_update, 1, ["a payload cannot be read", "safetensors"]),
    ],
    ids=lambda value: value.__name__.replace("_", " ") if callable(value) else "",
)
def test_what_cannot_be_resumed_is_refused(
    prepare: Callable[[], tuple[str, ...]], code: int, said: list[str], capsys: Capture
) -> None:
    found, text = resumed(capsys, *prepare())
    assert found == code, text
    for part in said:
        assert part in text
    assert "Traceback" not in text


def test_a_run_in_use_is_refused(capsys: Capture) -> None:
    run = killed(die_after(3))
    with RunLock(run):
        code, text = resumed(capsys)
    assert code == 1
    assert "is working on this run" in text and "stop it with: kill" in text


# --- what goes on


def test_a_finished_run_gives_its_summary_and_does_nothing(capsys: Capture) -> None:
    run = finished()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    code, _ = resumed(capsys)
    assert code == 0
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before
    assert execute(["train", "--resume", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["updates"] == 6


def test_a_finished_run_goes_on_with_more_updates(capsys: Capture) -> None:
    finished()
    code, text = resumed(capsys, "-o", "train.updates=8")
    assert code == 0, text
    expect_whole(updates=8)


def test_a_run_killed_before_its_first_checkpoint_starts_again(capsys: Capture) -> None:
    killed(At(RunStarted, die))
    code, text = resumed(capsys)
    assert code == 0, text
    expect_whole()


def test_a_stop_in_the_warm_start_ends_at_once_and_a_resume_starts_again(capsys: Capture) -> None:
    stop = At(RunStarted, lambda event: os.kill(os.getpid(), signal.SIGTERM))
    result = train("k.yaml", INLINE, observer=stop)
    assert (result["outcome"], result["updates"], result["issued"]) == ("stopped", 0, 0)
    code, text = resumed(capsys)
    assert code == 0, text
    expect_whole()


def test_a_run_that_died_after_its_last_update_gets_its_result(capsys: Capture) -> None:
    killed(die_after(6))
    code, text = resumed(capsys)
    assert code == 0, text
    expect_whole()
    assert Path("runs/k/model/model.safetensors").is_file()


def test_an_update_whose_commit_was_not_recorded_is_reported_by_its_redo(capsys: Capture) -> None:
    """The driver dies between the journal's commit and the event: metrics and summary lack nothing."""
    with pytest.raises(Killed):
        train("k.yaml", [*INLINE, "checkpoint.every_updates=4"], observer=die_after(3))
    segment = next((RUN / "events").iterdir())
    with gzip.open(segment, "rt") as file:
        lines = list(file)
    told = next(number for number, line in enumerate(lines) if '"update_committed"' in line and '"update":3' in line)
    with gzip.open(segment, "wt") as file:
        file.writelines(lines[:told])
    rows = (RUN / "metrics.jsonl").read_text().splitlines(keepends=True)
    (RUN / "metrics.jsonl").write_text("".join(row for row in rows if '"update": 3,' not in row))
    code, text = resumed(capsys)
    assert code == 0, text
    expect_whole()
    rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows if row["kind"] == "update"] == [1, 2, 3, 4, 5, 6]
    summary = json.loads((RUN / "summary.json").read_text())
    trained = sum(row["loss_tokens"] for row in rows if row["kind"] == "update")
    assert summary["trained_loss_tokens"] == trained


@pytest.mark.parametrize("torn", [False, True], ids=["missing", "torn"])
def test_the_checkpoint_before_serves_when_the_newest_is_missing_or_torn(torn: bool, capsys: Capture) -> None:
    newest = killed(die_after(5)) / "checkpoints" / "u000004"
    if torn:
        weights = newest / "weights.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        shutil.rmtree(newest)
    code, text = resumed(capsys)
    assert code == 0, text
    assert "checkpoint u000004 is missing or damaged: the one before it is used" in text
    expect_whole()


def test_what_a_killed_process_left_half_written_is_removed(capsys: Capture) -> None:
    run = killed(die_after(3))
    (run / "checkpoints" / ".u000004.0123abcd.partial").mkdir()
    (run / "checkpoints" / "u000003").mkdir()  # saved, but the journal never heard of it
    (run / "blobs" / "ab").mkdir(exist_ok=True)
    (run / "blobs" / "ab" / f"ab{'0' * 62}.7.part").write_bytes(b"half")
    (run / "blobs" / "ab" / f"ab{'0' * 62}.safetensors").write_bytes(b"its row was lost")
    code, text = resumed(capsys)
    assert code == 0, text
    expect_whole()
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"u000004", "u000006"}
    assert not list((run / "blobs" / "ab").glob(f"ab{'0' * 20}*"))


def test_a_copied_run_goes_on_elsewhere_and_the_original_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run = killed(die_after(3))
    elsewhere = tmp_path / "another machine"
    shutil.copytree(run, elsewhere / "copy")
    monkeypatch.chdir(elsewhere)
    code, text = resumed(capsys, run=Path("copy"))
    assert code == 0, text
    expect_whole(elsewhere / "copy")
    db = sqlite3.connect(tmp_path / "runs" / "k" / "journal.sqlite")
    assert db.execute("SELECT max(update_no) FROM updates").fetchone() == (3,)
    db.close()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_a_run_goes_on_with_another_number_of_ranks(before: int, after: int, capsys: Capture) -> None:
    with pytest.raises(Killed):
        train("k.yaml", [*INLINE, f"cluster.ranks={before}"], observer=die_after(3))
    code, text = resumed(capsys, "-o", f"cluster.ranks={after}")
    assert code == 0, text
    expect_whole()


# --- a disk that refuses


def test_a_checkpoint_that_cannot_be_written_costs_nothing_but_itself(capsys: Capture) -> None:
    """The folder of checkpoints is away during updates 2 to 5: the run goes on, says so, and is resumable later."""
    away = RUN / "away"
    folder = RUN / "checkpoints"

    def do(event: Event) -> None:
        update = getattr(event, "update", -1)
        if update == 2:
            folder.rename(away)
            folder.write_text("no folder")
        if update == 6:
            folder.unlink()
            away.rename(folder)

    result = train("k.yaml", INLINE, observer=At(UpdateCommitted, do))
    assert (result["outcome"], result["updates"]) == ("done", 6)
    assert result["faults"]["CheckpointError"] >= 1
    assert {path.name for path in folder.iterdir()} == {"u000000", "u000006"}
    expect_whole()


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """8 MB that can be filled without harm; only where the tests may mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)


def test_a_full_disk_ends_the_run_with_its_reason_and_a_resume_goes_on(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Journal and payloads cannot be done without: the run ends, what was committed is kept."""
    monkeypatch.chdir(small_disk)
    Path("k.yaml").write_text(TINY)
    filler = small_disk / "filler"

    def fill(event: Event) -> None:
        if getattr(event, "update", -1) != 3:
            return
        with filler.open("wb", buffering=0) as file:
            try:
                for size in (1 << 16, 1 << 10, 1):
                    while True:
                        file.write(bytes(size))
            except OSError:
                pass

    with pytest.raises(CheckpointError, match=r"No space left on device|disk is full"):
        train("k.yaml", INLINE, observer=At(UpdateCommitted, fill))
    assert audit(RUN / "journal.sqlite", RUN / "blobs") == []
    filler.unlink()
    assert resume(RUN)["outcome"] == "done"
    expect_whole()
