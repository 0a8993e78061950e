"""One driver per run directory: a lock that names its process and dies with it.

A lock of a process that no longer runs (or of another boot of the machine, or of another machine that the run was
copied from) is taken over. Must not know what a run is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import psutil

from tiderl.data.errors import CheckpointError, RunLockedError

LOCK_NAME = "lock"


class Holder(msgspec.Struct, frozen=True):
    """A process, named so that a later one with the same pid is another."""

    pid: int
    boot: str
    started: str

    @classmethod
    def of(cls, pid: int) -> Holder | None:
        """The living process with this pid; None when there is none."""
        started = _start_of(pid)
        return None if started is None else cls(pid, _boot(), started)

    def lives(self) -> bool:
        return Holder.of(self.pid) == self


class RunLock:
    """The lock of one run directory, held by this process until `release`."""

    def __init__(self, directory: Path | str) -> None:
        """Raises `RunLockedError` when a living process holds it, `CheckpointError` when it cannot be written."""
        self._path = Path(directory) / LOCK_NAME
        me = Holder.of(os.getpid())
        assert me is not None
        self._me = me
        with _exclusive(self._path) as file:
            holder = _read(file)
            if holder is not None and holder.lives():
                raise RunLockedError(
                    f"process {holder.pid} is working on this run",
                    where=str(directory),
                    hint=f"wait for it, or stop it with: kill {holder.pid}",
                )
            _write(file, msgspec.json.encode(me))

    def release(self) -> None:
        """Idempotent; leaves alone a lock that is no longer ours."""
        if not self._path.exists():
            return
        with _exclusive(self._path) as file:
            if _read(file) == self._me:
                _write(file, b"")

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[IO[bytes]]:
    """The lock file, opened for as long as nobody else has it open this way: look and write are one step."""
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
    except OSError as error:
        raise CheckpointError(f"the lock cannot be written: {error.strerror}", where=str(path)) from error


def _read(file: IO[bytes]) -> Holder | None:
    try:
        return msgspec.json.decode(file.read(), type=Holder)
    except msgspec.DecodeError:
        return None  # empty, or torn: who wrote it did not live to hold it


def _write(file: IO[bytes], content: bytes) -> None:
    file.seek(0)
    file.truncate()
    file.write(content)
    file.flush()


def _boot() -> str:
    """What differs between two boots of a machine and between two machines."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return str(int(psutil.boot_time()))


def _start_of(pid: int) -> str | None:
    """When the living process `pid` started, on the kernel's own clock; None for none, also for a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if stat[0] in "ZX" else stat[19]  # ticks since boot: no clock change moves them
    except (OSError, IndexError):
        pass
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else repr(process.create_time())
    except psutil.Error:
        return None
