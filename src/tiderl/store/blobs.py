"""Payloads by content hash: files in a folder, or memory. A name is the SHA-256 of the bytes it stands for.

A file is written before the journal names it, and checked whenever it is read: what a crash tore was never named, or is
found out. A payload of some kB is written directly, in about 0.12 ms (measured): less than a thread's hand-over is
worth. Large ones go to a thread. Files are used again: a file system that has just deleted many may take 1 to 5 ms to
make a new one (ext4, measured).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from tiderl.data.errors import CheckpointError
from tiderl.data.records import Trajectory
from tiderl.data.spans import span
from tiderl.store.payload import decode, encode, identity

DIRECT_TOKENS = 4096  # about 50 kB and 0.3 ms
SPARE_FILES = 1024  # the trajectories of some updates; more deleted ones than this are really deleted


def blob_path(sha256: str) -> str:
    """Where a payload lies in its folder: `ab/abcdef….safetensors`."""
    return f"{sha256[:2]}/{sha256}.safetensors"


class FileBlobs:
    """The `Blobs` of a run directory. `threaded=False` never uses a thread, for runs that must be deterministic."""

    def __init__(self, directory: Path | str, threaded: bool = True) -> None:
        self._directory = Path(directory)
        self._root = os.fspath(directory)
        self._threaded = threaded
        self._folders: set[str] = set()
        self._spare: dict[str, None] = {}
        """Paths of deleted payloads whose files wait for new content, oldest first."""

    async def put(self, trajectory: Trajectory) -> str:
        if self._threaded and trajectory.tokens > DIRECT_TOKENS:
            return await asyncio.to_thread(self._put, trajectory)
        return self._put(trajectory)

    def _put(self, trajectory: Trajectory) -> str:
        with span("payloads"):
            return self._encode_and_write(trajectory)

    def _encode_and_write(self, trajectory: Trajectory) -> str:
        sha256, data = encode(trajectory)
        path = f"{self._root}/{blob_path(sha256)}"
        try:
            if (folder := sha256[:2]) not in self._folders:
                os.makedirs(f"{self._root}/{folder}", exist_ok=True)
                self._folders.add(folder)
            self._write(path, data)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise CheckpointError(f"a payload cannot be written: {error.strerror}", where=path) from error
        return sha256

    def _write(self, path: str, data: bytes) -> None:
        """One unbuffered write: `pathlib` and a buffer would cost as much as the rest of `put`."""
        self._spare.pop(path, None)  # the same content again
        with contextlib.suppress(KeyError, FileNotFoundError):  # there is none to use again
            os.rename(self._spare.popitem()[0], path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            written = os.write(descriptor, data)
            if written < len(data):  # a disk that is nearly full, or more than 2 GB
                os.write(descriptor, data[written:])
            os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)

    async def get(self, sha256: str) -> Trajectory:
        path = f"{self._root}/{blob_path(sha256)}"
        try:
            if path in self._spare:
                raise FileNotFoundError(errno.ENOENT, "it was deleted", path)
            data = Path(path).read_bytes()
        except OSError as error:
            raise CheckpointError(f"a payload cannot be read: {error.strerror}", where=path) from error
        return decode(sha256, data, path)

    async def delete(self, sha256s: Sequence[str]) -> None:
        for sha256 in sha256s:
            path = f"{self._root}/{blob_path(sha256)}"
            if len(self._spare) < SPARE_FILES:
                self._spare[path] = None
                continue
            try:
                Path(path).unlink(missing_ok=True)
            except OSError as error:
                raise CheckpointError(f"a payload cannot be deleted: {error.strerror}", where=path) from error

    async def keep_only(self, sha256s: Collection[str]) -> None:
        kept = {blob_path(sha256) for sha256 in sha256s}
        others = (path for path in self._directory.rglob("*") if path.is_file())
        for path in others:
            if path.relative_to(self._directory).as_posix() not in kept:
                path.unlink(missing_ok=True)


class MemoryBlobs:
    """The `Blobs` of a simulated run: the records themselves, named by identity: their arrays have no content."""

    def __init__(self) -> None:
        self._kept: dict[str, Trajectory] = {}

    async def put(self, trajectory: Trajectory) -> str:
        sha256 = identity(trajectory)
        self._kept[sha256] = trajectory
        return sha256

    async def get(self, sha256: str) -> Trajectory:
        if sha256 not in self._kept:
            raise CheckpointError("a payload is missing", where=sha256)
        return self._kept[sha256]

    async def delete(self, sha256s: Sequence[str]) -> None:
        for sha256 in sha256s:
            self._kept.pop(sha256, None)

    async def keep_only(self, sha256s: Collection[str]) -> None:
        self._kept = {sha256: self._kept[sha256] for sha256 in self._kept if sha256 in sha256s}
