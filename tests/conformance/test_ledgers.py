"""All ledgers keep the same promises: SQLite behind its thread, SQLite direct, memory."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from support.ledger_suite import PROMISES, Promise, Reopen, dropped, name_of, ready, running

from tiderl.data.errors import CheckpointError, InvariantViolation
from tiderl.runtime.ports import CheckpointRow, Ledger, TrajectoryRow, VersionRow
from tiderl.store.memory import MemoryLedger
from tiderl.store.sqlite import Journal, SqliteLedger


def memory_pair(_: Path) -> tuple[Callable[[], Ledger], Reopen]:
    async def reopen(ledger: Ledger) -> Ledger:
        assert isinstance(ledger, MemoryLedger)
        return ledger.reopen()

    return MemoryLedger, reopen


def sqlite_pair(folder: Path, threaded: bool) -> tuple[Callable[[], Ledger], Reopen]:
    def make() -> Ledger:
        return SqliteLedger(folder / "journal.sqlite", threaded)

    async def reopen(ledger: Ledger) -> Ledger:
        await ledger.close()
        return make()

    return make, reopen


KINDS: dict[str, Callable[[Path], tuple[Callable[[], Ledger], Reopen]]] = {
    "sqlite_threaded": lambda folder: sqlite_pair(folder, True),
    "sqlite_direct": lambda folder: sqlite_pair(folder, False),
    "memory": memory_pair,
}


@pytest.mark.parametrize("promise", PROMISES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
def test_ledger(kind: str, promise: Promise, tmp_path: Path) -> None:
    async def check() -> None:
        make, reopen = KINDS[kind](tmp_path)
        await promise(make(), reopen)

    asyncio.run(check())


# -------------------------------------------------------------------------------- on disk only


def test_failed_background_append_surfaces_at_the_next_call(tmp_path: Path) -> None:
    async def check() -> None:
        ledger = SqliteLedger(tmp_path / "journal.sqlite")
        ledger.append([running(0)])
        ledger.append([dropped(0)])
        ledger.append([ready(0)])  # refused by the writer, which nobody waits for
        with pytest.raises(InvariantViolation, match="ended as dropped"):
            await ledger.commit(1, [])
        with pytest.raises(InvariantViolation):
            ledger.append([running(1)])
        with pytest.raises(InvariantViolation):
            await ledger.close()

    asyncio.run(check())


def test_newer_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    asyncio.run(SqliteLedger(path, threaded=False).close())
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value='99' WHERE key='schema_version'")
    db.close()
    with pytest.raises(CheckpointError, match="schema 99"):
        SqliteLedger(path)


def test_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(CheckpointError, match="not a database"):
        SqliteLedger(path)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        SqliteLedger(tmp_path / "nowhere" / "journal.sqlite")


def test_rows_survive_without_close(tmp_path: Path) -> None:
    """What a commit returned from is in the file for everybody, as after kill -9 of the writer."""

    async def check() -> None:
        ledger = SqliteLedger(tmp_path / "journal.sqlite")
        ledger.append([ready(0), running(1)])
        await ledger.commit(1, [0])
        other = SqliteLedger(tmp_path / "journal.sqlite", threaded=False)
        assert [row.status for row in (await other.replay()).trajectories] == ["trained", "running"]
        await other.close()
        await ledger.close()

    asyncio.run(check())


def test_checkpoint_marks_the_updates_it_holds(tmp_path: Path) -> None:
    async def fill() -> None:
        ledger = SqliteLedger(tmp_path / "journal.sqlite")
        ledger.append([ready(0), ready(1), ready(2)])
        await ledger.commit(1, [0])
        await ledger.commit(2, [1])
        await ledger.durable(CheckpointRow("c2", 2))
        await ledger.commit(3, [2])
        await ledger.close()

    asyncio.run(fill())
    db = sqlite3.connect(tmp_path / "journal.sqlite")
    assert db.execute("SELECT update_no, trajectory_ids, checkpoint FROM updates").fetchall() == [
        (1, "[0]", "c2"),
        (2, "[1]", "c2"),
        (3, "[2]", None),
    ]
    db.close()


# ------------------------------------------------------------------------------- in memory only


def test_crash_loses_whole_transactions_from_the_end() -> None:
    async def check() -> None:
        ledger = MemoryLedger()
        ledger.append([ready(0), ready(1)])
        await ledger.commit(1, [0, 1])
        ledger.append([running(2)])
        ledger.append([running(3), VersionRow(1, 1)])
        assert len((await ledger.reopen(lose_tail_rows=1).replay()).trajectories) == 3
        assert (await ledger.reopen(lose_tail_rows=1).replay()).versions == ()
        torn = await ledger.reopen(lose_tail_rows=1, tear=True).replay()
        assert [row.id for row in torn.trajectories] == [0, 1]
        assert torn.updates == ((1, (0, 1)),)
        lost = await ledger.reopen(lose_tail_rows=4).replay()
        assert lost.updates == ()
        assert [row.status for row in lost.trajectories] == ["ready", "ready"]

    asyncio.run(check())


def test_crash_never_loses_what_a_durable_checkpoint_holds() -> None:
    async def check() -> None:
        ledger = MemoryLedger()
        ledger.append([ready(0)])
        await ledger.commit(1, [0])
        await ledger.durable(CheckpointRow("c1", 1))
        ledger.append([running(1)])
        found = await ledger.reopen(lose_tail_rows=100, tear=True).replay()
        assert found.updates == ((1, (0,)),) and found.checkpoints == (CheckpointRow("c1", 1),)

    asyncio.run(check())


def test_snapshot_is_not_changed_by_what_follows() -> None:
    async def check() -> None:
        ledger = MemoryLedger()
        ledger.append([running(0)])
        kept = ledger.snapshot()
        ledger.append([running(1)])
        assert len((await MemoryLedger(kept).replay()).trajectories) == 1

    asyncio.run(check())


def test_a_journal_of_schema_1_is_read_and_written_on(tmp_path) -> None:
    path = tmp_path / "journal.sqlite"
    db = sqlite3.connect(path)
    db.executescript(
        """
        CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
        INSERT INTO meta VALUES('schema_version', '1');
        CREATE TABLE trajectories(
            id INTEGER PRIMARY KEY, prompt_id INTEGER NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL,
            status TEXT NOT NULL, reason TEXT, update_no INTEGER, sha256 TEXT);
        INSERT INTO trajectories VALUES(0, 0, 0, 0, 'ready', NULL, NULL, 'abc');
        """
    )
    db.close()
    journal = Journal(path)
    journal.append([TrajectoryRow(1, 0, 1, 0, "running")])
    journal.append([TrajectoryRow(1, 0, 1, 0, "ready", sha256="def", ready_update=3)])
    assert [(row.id, row.ready_update) for row in journal.replay().trajectories] == [(0, None), (1, 3)]
    journal.close()
    again = sqlite3.connect(path)
    assert again.execute("SELECT value FROM meta").fetchall() == [("2",)]
    again.close()
