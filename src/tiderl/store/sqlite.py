"""The journal on disk: SQLite in WAL mode, one writer thread behind the port (I1, I2).

Rows are committed with `synchronous=NORMAL`, which survives kill -9; a checkpoint becomes durable with a FULL commit,
which survives a power cut. The tables are documented (docs/journal.md): an outside audit reads them with plain sqlite3.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

from tiderl.data.errors import CheckpointError, TideError
from tiderl.data.spans import span
from tiderl.runtime.ports import CheckpointRow, LedgerRow, PromptRow, Replay, TrajectoryRow, VersionRow
from tiderl.store.rules import check_append, check_commit, check_once, check_trajectory

T = TypeVar("T")

SCHEMA_VERSION = 2
LINGER_S = 0.02
"""Rows that come within this time share a transaction, unless somebody waits: one each would cost twice as much."""
CACHE_KIB = 512
"""Pages kept in memory: only the newest rows are looked at, and a long run's memory stays flat."""
LOCKED_WAIT_S = 5.0  # how long another reader or writer of the file may hold it

TABLES = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS prompts(
    prompt_id INTEGER PRIMARY KEY, task_id TEXT NOT NULL, seed NOT NULL, start_version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS trajectories(
    id INTEGER PRIMARY KEY, prompt_id INTEGER NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('running', 'ready', 'trained', 'dropped')),
    reason TEXT, update_no INTEGER, sha256 TEXT, ready_update INTEGER);
CREATE TABLE IF NOT EXISTS updates(update_no INTEGER PRIMARY KEY, trajectory_ids TEXT NOT NULL, checkpoint TEXT);
CREATE TABLE IF NOT EXISTS versions(version INTEGER PRIMARY KEY, update_no INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints(checkpoint TEXT PRIMARY KEY, update_no INTEGER NOT NULL);
"""


class Journal:
    """The file itself: synchronous, one transaction a call. Raises `CheckpointError` when the disk refuses."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with self._translated():
            # One thread at a time uses the connection: the writer, or the caller where there is none.
            self._db = sqlite3.connect(self.path, timeout=LOCKED_WAIT_S, isolation_level=None, check_same_thread=False)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        if self._db.execute("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone():
            self._refuse_newer()  # before anything is written to it
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("PRAGMA fullfsync=1")  # macOS: a sync that reaches the disk; nothing elsewhere
        self._db.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        self._db.executescript(TABLES)
        self._db.execute("INSERT OR IGNORE INTO meta VALUES('schema_version', ?)", (str(SCHEMA_VERSION),))
        self._migrate()

    def _migrate(self) -> None:
        """A journal of schema 1 gets what schema 2 has; a newer one is not touched."""
        if not any(column[1] == "ready_update" for column in self._db.execute("PRAGMA table_info(trajectories)")):
            self._db.execute("ALTER TABLE trajectories ADD COLUMN ready_update INTEGER")
            self._db.execute("UPDATE meta SET value=? WHERE key='schema_version'", (str(SCHEMA_VERSION),))

    def _refuse_newer(self) -> None:
        found = self._db.execute("SELECT value FROM meta WHERE key='schema_version'").fetchone()
        if found is not None and int(found[0]) > SCHEMA_VERSION:
            raise CheckpointError(
                f"the journal has schema {found[0]}, this TideRL knows up to {SCHEMA_VERSION}",
                where=str(self.path),
                hint="update TideRL",
            )

    def append(self, rows: Sequence[LedgerRow]) -> None:
        with self._transaction():
            for row in rows:
                self._append(row)

    def commit(self, update: int, trajectory_ids: Sequence[int]) -> None:
        with self._transaction():
            last = self._db.execute("SELECT max(update_no) FROM updates").fetchone()[0]
            query = "SELECT id, status FROM trajectories WHERE id=?"
            found = (self._db.execute(query, (int(number),)).fetchone() for number in trajectory_ids)
            check_commit(update, trajectory_ids, last, dict(row for row in found if row is not None))
            ids = json.dumps([int(number) for number in trajectory_ids])
            self._db.execute("INSERT INTO updates(update_no, trajectory_ids) VALUES(?, ?)", (update, ids))
            self._db.executemany(
                "UPDATE trajectories SET status='trained', update_no=? WHERE id=?",
                [(update, int(number)) for number in trajectory_ids],
            )

    def durable(self, row: CheckpointRow) -> None:
        with self._translated():
            self._db.execute("PRAGMA synchronous=FULL")
        try:
            with self._transaction():
                self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES(?, ?)", (row.checkpoint, row.update_no))
                self._db.execute(
                    "UPDATE updates SET checkpoint=? WHERE update_no<=? AND checkpoint IS NULL",
                    (row.checkpoint, row.update_no),
                )
        finally:
            with self._translated():
                self._db.execute("PRAGMA synchronous=NORMAL")

    def replay(self) -> Replay:
        def rows(query: str) -> Iterator[tuple[Any, ...]]:
            return iter(self._db.execute(query))

        with self._translated():
            return Replay(
                prompts=tuple(
                    PromptRow(number, task, int(seed), version)
                    for number, task, seed, version in rows(f"{_SELECT_PROMPT} ORDER BY prompt_id")
                ),
                trajectories=tuple(TrajectoryRow(*row) for row in rows(f"{_SELECT_TRAJECTORY} ORDER BY id")),
                updates=tuple(
                    (number, tuple(json.loads(ids)))
                    for number, ids in rows("SELECT update_no, trajectory_ids FROM updates ORDER BY update_no")
                ),
                versions=tuple(VersionRow(*row) for row in rows(f"{_SELECT_VERSION} ORDER BY version")),
                checkpoints=tuple(
                    CheckpointRow(*row)
                    for row in rows("SELECT checkpoint, update_no FROM checkpoints ORDER BY update_no, checkpoint")
                ),
            )

    def close(self) -> None:
        with self._translated():
            self._db.close()

    def _append(self, row: LedgerRow) -> None:
        if isinstance(row, TrajectoryRow):
            found = self._db.execute(f"{_SELECT_TRAJECTORY} WHERE id=?", (row.id,)).fetchone()
            check_trajectory(None if found is None else TrajectoryRow(*found), row)
            self._db.execute("INSERT OR REPLACE INTO trajectories VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(row))
        elif isinstance(row, PromptRow):
            found = self._db.execute(f"{_SELECT_PROMPT} WHERE prompt_id=?", (row.prompt_id,)).fetchone()
            check_once(None if found is None else PromptRow(found[0], found[1], int(found[2]), found[3]), row)
            seed = row.seed if -(1 << 63) <= row.seed < 1 << 63 else str(row.seed)  # what SQLite's integers hold
            self._db.execute(
                "INSERT OR REPLACE INTO prompts VALUES(?, ?, ?, ?)",
                (row.prompt_id, row.task_id, seed, row.start_version),
            )
        else:
            found = self._db.execute(f"{_SELECT_VERSION} WHERE version=?", (row.version,)).fetchone()
            check_once(None if found is None else VersionRow(*found), row)
            self._db.execute("INSERT OR REPLACE INTO versions VALUES(?, ?)", astuple(row))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with span("journal"), self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk rolls back by itself
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OverflowError) as error:
            raise CheckpointError(f"the journal cannot be used: {error}", where=str(self.path)) from error


_SELECT_PROMPT = "SELECT prompt_id, task_id, seed, start_version FROM prompts"
_SELECT_TRAJECTORY = (
    "SELECT id, prompt_id, member, attempt, status, reason, update_no, sha256, ready_update FROM trajectories"
)
_SELECT_VERSION = "SELECT version, update_no FROM versions"


@dataclass(frozen=True)
class _Job:
    """Work of the writer thread: rows to append, or a call whose outcome somebody awaits."""

    rows: tuple[LedgerRow, ...] = ()
    call: Callable[[], Any] | None = None
    done: Callable[[Any, BaseException | None], None] | None = None
    last: bool = False


class SqliteLedger:
    """The `Ledger` over a `Journal`. `threaded=False` writes in the caller, for runs that must be deterministic.

    A background append that fails makes every later call raise its error: a journal with a hole is not written further.
    """

    def __init__(self, path: Path | str, threaded: bool = True) -> None:
        self._journal = Journal(path)
        self._failure: TideError | None = None
        self._closed = False
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._call_waits = threading.Event()
        self._writer: threading.Thread | None = None
        if threaded:
            self._writer = threading.Thread(target=self._write, name="journal writer", daemon=True)
            self._writer.start()

    def append(self, rows: Sequence[LedgerRow]) -> None:
        self._check()
        check_append(rows)
        if self._writer is not None:
            self._jobs.put(_Job(rows=tuple(rows)))
        else:
            self._append(rows)
            self._check()

    async def commit(self, update: int, trajectory_ids: Sequence[int]) -> None:
        ids = tuple(trajectory_ids)
        await self._call(lambda: self._journal.commit(update, ids))

    async def durable(self, checkpoint: CheckpointRow) -> None:
        await self._call(lambda: self._journal.durable(checkpoint))

    async def replay(self) -> Replay:
        return await self._call(self._journal.replay)

    async def close(self) -> None:
        """Writes what is queued. Raises the error of a failed append once more, so that it is not lost."""
        if self._closed:
            return
        try:
            await self._call(self._journal.close, last=True)
        finally:
            self._closed = True

    async def _call(self, call: Callable[[], T], last: bool = False) -> T:
        if not last:
            self._check()
        if self._writer is None:
            result = call()
            self._check()
            return result
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def deliver(result: Any, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        def done(result: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(deliver, result, error)

        self._jobs.put(_Job(call=call, done=done, last=last))
        self._call_waits.set()
        return await answer

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise CheckpointError("the journal is closed", where=str(self._journal.path))

    def _append(self, rows: Sequence[LedgerRow]) -> None:
        try:
            self._journal.append(rows)
        except TideError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 the writer thread's boundary: it must not end in silence
            self._failure = CheckpointError(f"the journal failed: {type(error).__name__}: {error}")

    def _write(self) -> None:
        """The writer thread: all rows that wait go in one transaction, then the call that waits behind them."""
        while True:
            rows: list[LedgerRow] = []
            job = self._jobs.get()
            if job.call is None:
                self._call_waits.wait(LINGER_S)
                self._call_waits.clear()
            while job.call is None:
                rows += job.rows
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
            if rows and self._failure is None:
                self._append(rows)
            if job.call is not None and job.done is not None:
                self._answer(job)
            if job.last:
                return

    def _answer(self, job: _Job) -> None:
        assert job.call is not None and job.done is not None
        result, error = None, self._failure
        if error is None or job.last:
            try:
                result = job.call()
            except TideError as refusal:
                error = error or refusal
            except Exception as bug:  # noqa: BLE001 as above: who waits must hear of it
                error = CheckpointError(f"the journal failed: {type(bug).__name__}: {bug}")
        job.done(result, error)


def read_journal(path: Path | str) -> Replay | None:
    """The journal of a run that nobody works on; None where there is none. Raises `CheckpointError`."""
    if not Path(path).is_file():
        return None
    journal = Journal(path)
    try:
        return journal.replay()
    finally:
        journal.close()


def read_checkpoints(path: Path | str) -> list[tuple[int, str]]:
    """(update, name) of every durable checkpoint, oldest first; reads only, also while a driver works on the run.

    Raises `CheckpointError`."""
    if not Path(path).is_file():
        raise CheckpointError("there is no journal", where=str(path))
    try:
        with contextlib.closing(sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True)) as db:
            return list(db.execute("SELECT update_no, checkpoint FROM checkpoints ORDER BY update_no"))
    except sqlite3.Error as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path)) from error
