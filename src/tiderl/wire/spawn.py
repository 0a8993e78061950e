"""Child processes that speak over a channel: made with a socket pair, gone with their parent.

A child computes in one thread: two OpenMP threads beside a busy neighbour made torch 10 to 20 times slower.
No fork: a fresh interpreter on Linux and macOS alike. Must not know what the child does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping
from pathlib import Path

from tiderl.data.errors import InfrastructureFault
from tiderl.wire.channel import Channel

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
WATCH_S = 0.25  # how often a child looks whether its parent still lives; it must be gone within 2 s


class Child:
    """A child process and the parent's end of its channel."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.process = process
        self.socket = sock

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL to the child and all it started; idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
            os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self, timeout_s: float = 5.0) -> int | None:
        """The exit status, once the process is gone; None when it is not within `timeout_s`. Blocks."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def status(self) -> str:
        """How the process ended, in words, for messages; looks only."""
        code = self.process.poll()
        if code is None:
            return "still running"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def spawn(module: str, *arguments: str, log: Path | int | None = None, env: Mapping[str, str] | None = None) -> Child:
    """Start `python -m module --fd N arguments…`, stdin empty, stdout and stderr appended to `log`: a file,
    an open file descriptor, None for nowhere. Raises `InfrastructureFault` when no process can be started."""
    ours, theirs = socket.socketpair()
    try:
        with contextlib.ExitStack() as stack:
            output: int = subprocess.DEVNULL
            if isinstance(log, Path):
                output = stack.enter_context(log.open("ab")).fileno()
            elif log is not None:
                output = log
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--fd", str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": _import_path(), **(env or {})},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # its own group: Ctrl-C goes to the driver alone
            )
    except OSError as error:
        ours.close()
        raise InfrastructureFault(f"no process for {module} could be started: {error}") from error
    finally:
        theirs.close()
    return Child(process, ours)


def attach(fd: int) -> Channel:
    """The child's end of the channel, from the number after `--fd`. Its own children do not inherit it."""
    os.set_inheritable(fd, False)
    return Channel(socket.socket(fileno=fd))


def die_with_parent(channel: Channel) -> None:
    """End this process when the channel's other end closes or the parent dies, even while it computes."""
    parent = os.getppid()

    def watch() -> None:
        poller = select.poll()
        poller.register(channel.socket, 0)  # no event asked for: POLLHUP, POLLERR and POLLNVAL come anyway
        while os.getppid() == parent:
            if poller.poll(WATCH_S * 1000):
                break
        os._exit(0)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


def _import_path() -> str:
    """The child imports what the parent would: the parent's own entries, without those that every interpreter has."""
    everywhere = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), site.getusersitepackages()]
    shared = [Path(folder).resolve() for folder in (*everywhere, *site.getsitepackages())]
    own = [entry for entry in sys.path if entry and not any(Path(entry).resolve().is_relative_to(f) for f in shared)]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry not in own]
    return os.pathsep.join([*own, *inherited])
