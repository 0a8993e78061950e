"""How much memory an environment's process may take: an environment that eats it is a typed fault, not a dead machine.

Counted above what the worker holds once the class is loaded. A watch looks at resident memory everywhere; where one
environment has the process for itself, Linux also refuses each allocation past the limit, which no call into C that
keeps the interpreter busy can outrun. Must not know channels or tasks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

MEMORY_EXIT_STATUS = 86
"""How a worker ends that took more than it may; the driver tells it from other deaths by this."""
WATCH_S = 0.25
DEFAULT_LIMIT_FRACTION = 0.5
"""Of the machine's memory, for a worker whose environment declares no limit: a runaway list must not take it all."""
STACKS_BYTES = 128 * 2**20
"""Room for the stacks of the worker's own threads (8 MiB each), which count as data too."""


def guard_memory(limit_bytes: int | None, *, alone: bool) -> None:
    """Bound this process from now on. `limit_bytes`: what the environment declares, children included; None: the
    default, this process only. `alone`: one environment at a time, so the kernel may refuse its allocations."""
    bound = resident_bytes() + (limit_bytes or int(psutil.virtual_memory().total * DEFAULT_LIMIT_FRACTION))
    if limit_bytes is not None and alone and sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + limit_bytes + STACKS_BYTES, hard))
    measure = tree_bytes if limit_bytes is not None else resident_bytes
    threading.Thread(target=_watch, args=(bound, measure), name="memory", daemon=True).start()


def resident_bytes(pid: int | None = None) -> int:
    """Of one process, this one without `pid`."""
    return int(psutil.Process(pid).memory_info().rss)


def tree_bytes(pid: int | None = None) -> int:
    """Resident bytes of a process and all that it started; shared pages count in each."""
    process = psutil.Process(pid)
    total = int(process.memory_info().rss)
    for child in process.children(recursive=True):
        try:
            total += int(child.memory_info().rss)
        except psutil.Error:
            continue  # it ended meanwhile
    return total


def _watch(bound: int, measure: Callable[[], int]) -> None:
    while (used := measure()) <= bound:
        time.sleep(WATCH_S)
    # Straight to the descriptor: the environment may hold the locks of sys.stderr.
    os.write(2, f"the worker holds {used // 2**20} MiB, more than {bound // 2**20}\n".encode())
    time.sleep(WATCH_S)  # until the line is in the log
    os._exit(MEMORY_EXIT_STATUS)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts of this process so far (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
