"""A run directory has one living driver; the lock of a dead one is taken over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tiderl.data.errors import CheckpointError, RunLockedError
from tiderl.store.lock import LOCK_NAME, Holder, RunLock

HOLD = """
import sys
from tiderl.store.lock import RunLock
lock = RunLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def hold_elsewhere(folder: Path) -> subprocess.Popen[bytes]:
    """A process that holds the lock until its stdin closes."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.communicate()


def test_second_driver_is_refused_and_told_the_pid(tmp_path: Path) -> None:
    process = hold_elsewhere(tmp_path)
    try:
        with pytest.raises(RunLockedError, match=str(process.pid)):
            RunLock(tmp_path)
    finally:
        end(process)


def test_lock_of_a_killed_driver_is_taken_over(tmp_path: Path) -> None:
    process = hold_elsewhere(tmp_path)
    process.send_signal(signal.SIGKILL)
    end(process)
    with RunLock(tmp_path), pytest.raises(RunLockedError, match=str(os.getpid())):
        RunLock(tmp_path)


def test_driver_that_nobody_reaped_is_dead(tmp_path: Path) -> None:
    process = hold_elsewhere(tmp_path)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    with RunLock(tmp_path):
        pass
    end(process)


def test_released_lock_is_free(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.release()
    lock.release()
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("changed", [{"boot": "another"}, {"started": "1"}], ids=str)
def test_other_boot_or_other_start_of_the_same_pid_is_another_process(tmp_path: Path, changed: dict[str, str]) -> None:
    me = Holder.of(os.getpid())
    assert me is not None and me.lives()
    (tmp_path / LOCK_NAME).write_bytes(msgspec.json.encode(msgspec.structs.replace(me, **changed)))
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("content", [b"", b'{"pid": 12', b"[]"], ids=str)
def test_torn_lock_is_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_NAME).write_bytes(content)
    with RunLock(tmp_path):
        pass


def test_release_leaves_the_lock_of_another_alone(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    other = msgspec.json.encode(Holder(1, "another", "1"))
    (tmp_path / LOCK_NAME).write_bytes(other)
    lock.release()
    assert (tmp_path / LOCK_NAME).read_bytes() == other


def test_missing_directory_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        RunLock(tmp_path / "nowhere")
