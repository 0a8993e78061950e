"""Published versions as files: what `export` writes on the trainer's rank and `load_weights` reads on a rollout rank.

Keeps I2 on its side: a file's name holds its version, and a file appears whole, by rename. A folder of our own is
locked while its process lives, so that a later one can tell, and remove, what a killed process left. Where the driver
owns it, published versions outlive the rank that wrote them. Knows nothing of models.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from tiderl.data.errors import CheckpointError, ConfigurationError
from tiderl.data.records import WeightHandle

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX = "tiderl-weights-"
LOCK_NAME = "lock"
VERSIONS_ALIVE = 4
"""Shared memory is used where it has room for this many versions: the newest, those being read, one being written."""


class WeightExports:
    """The exported versions of one trainer. `weight_bytes` is the size of one, to choose where they go."""

    def __init__(self, weights_dir: str, weight_bytes: int) -> None:
        self._own = None if weights_dir else WeightsFolder(weight_bytes)
        self.directory = self._own.path if self._own else Path(weights_dir).absolute()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _no_place(error) from error

    def write(self, version: int, weights: Mapping[str, Any]) -> WeightHandle:
        """Write one version (names -> CPU tensors). Raises `CheckpointError` where the disk refuses."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self._path(version)
        partial = path.with_suffix(".partial")
        try:
            save_file(dict(weights), partial, metadata={"format": "pt", "version": str(version)})
            partial.rename(path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise CheckpointError(f"cannot write version {version}: {error}", where=str(self.directory)) from error
        return WeightHandle(version, str(path), path.stat().st_size)

    def discard(self, handle: WeightHandle) -> None:
        """Delete a version's file, also one of an earlier process; one that is gone already is none the worse."""
        path = Path(handle.path)
        if path.name != self._path(handle.version).name:
            raise CheckpointError(f"not an exported version: {handle.path}", where="discard")
        path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder, where it is our own. Idempotent."""
        if self._own is not None:
            self._own.close()

    def _path(self, version: int) -> Path:
        return self.directory / f"weights-v{version}.safetensors"


class WeightsFolder:
    """A new folder for versions, locked by this process until `close` removes it. `weight_bytes`: the size of one."""

    def __init__(self, weight_bytes: int) -> None:
        parent = _roomy_parent(weight_bytes)
        remove_leftovers(parent)
        name = f"{FOLDER_PREFIX}{os.getpid()}-{uuid4().hex[:8]}"
        hidden = parent / f".{name}"  # it gets its name only once it is locked, so no one takes it for a leftover
        try:
            hidden.mkdir(mode=0o700)
            self._lock = os.open(hidden / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = hidden.rename(parent / name)
        except OSError as error:
            raise _no_place(error) from error

    def close(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _no_place(error: OSError) -> ConfigurationError:
    return ConfigurationError(f"no place for weights: {error}", where="weights_dir")


def remove_leftovers(parent: Path) -> None:
    """Delete the folders of trainers that no longer live: those whose lock is free. Other users' are left alone."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        try:
            descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # without a lock, or not ours to open
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # its trainer lives
        finally:
            os.close(descriptor)


def _roomy_parent(weight_bytes: int) -> Path:
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    if usable and shutil.disk_usage(SHARED_MEMORY).free > VERSIONS_ALIVE * weight_bytes:
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())
