"""Payloads by content hash: files in a folder, or memory. A name is the SHA-256 of the bytes it stands for.

A file appears whole or not at all (write aside, then rename); it is checked whenever it is read. A payload of some kB
is written directly, in about 0.15 ms (measured): less than a thread's hand-over is worth. Large ones go to a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path

from tiderl.data.errors import CheckpointError
from tiderl.data.records import Trajectory
from tiderl.store.payload import decode, encode, identity

DIRECT_TOKENS = 4096  # about 50 kB and 0.3 ms


def blob_path(sha256: str) -> str:
    """Where a payload lies in its folder: `ab/abcdef….safetensors`."""
    return f"{sha256[:2]}/{sha256}.safetensors"


class FileBlobs:
    """The `Blobs` of a run directory. `threaded=False` never uses a thread, for runs that must be deterministic."""

    def __init__(self, directory: Path | str, threaded: bool = True) -> None:
        self._directory = Path(directory)
        self._threaded = threaded

    async def put(self, trajectory: Trajectory) -> str:
        if self._threaded and trajectory.tokens > DIRECT_TOKENS:
            return await asyncio.to_thread(self._put, trajectory)
        return self._put(trajectory)

    def _put(self, trajectory: Trajectory) -> str:
        sha256, data = encode(trajectory)
        path = self._directory / blob_path(sha256)
        aside = path.with_suffix(f".{trajectory.id}.part")
        try:
            try:
                aside.write_bytes(data)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                aside.write_bytes(data)
            aside.replace(path)
        except OSError as error:
            raise CheckpointError(f"a payload cannot be written: {error.strerror}", where=str(path)) from error
        return sha256

    async def get(self, sha256: str) -> Trajectory:
        path = self._directory / blob_path(sha256)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"a payload cannot be read: {error.strerror}", where=str(path)) from error
        return decode(sha256, data, str(path))

    async def delete(self, sha256s: Sequence[str]) -> None:
        for sha256 in sha256s:
            path = self._directory / blob_path(sha256)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise CheckpointError(f"a payload cannot be deleted: {error.strerror}", where=str(path)) from error

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
