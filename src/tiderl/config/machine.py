"""What the configuration asks of the machine: how much memory its ranks may share, and where the model is.

Totals, never what happens to be free: the same machine gives the same run (I10).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from tiderl.config.load import load_config
from tiderl.config.model_folder import model_folder
from tiderl.config.resolve import Command, Resolved, resolve

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """The machine's memory, or the container's limit where that is smaller."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def prepare(
    path: str | Path, overrides: Sequence[str] = (), *, command: Command, needs_weights: bool = False
) -> Resolved:
    """Load, check and resolve. `sim` runs on a described machine, so this one's memory does not count there.

    `needs_weights`: the model will be run, so all of it must be here; of a hub id that may be a download.
    """
    loaded = load_config(path, overrides)
    return resolve(
        loaded,
        command=command,
        memory_bytes=None if command == "sim" else memory_bytes(),
        model_folder=model_folder(loaded, whole=needs_weights),
    )
