"""A payload comes back with every field, under a name that is the hash of its bytes, or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tiderl.data.errors import CheckpointError
from tiderl.data.forks import Fork
from tiderl.data.records import TaskKey, Trajectory, TurnSpan
from tiderl.runtime.ports import Blobs
from tiderl.store.blobs import DIRECT_TOKENS, FileBlobs, MemoryBlobs, blob_path
from tiderl.store.payload import decode, encode, identity


def trajectory(tokens: int, number: int = 7) -> Trajectory:
    rng = np.random.default_rng(tokens)
    return Trajectory(
        id=number,
        key=TaskKey("train", 3, 2, 1),
        ids=rng.integers(0, 100, tokens).astype(np.int32),
        loss_mask=rng.random(tokens) > 0.5,
        logprobs=-rng.random(tokens).astype(np.float32),
        versions=rng.integers(-1, 4, tokens).astype(np.int32),
        turns=(TurnSpan(2, 4, 0.1, "go left", "stop"), TurnSpan(6, 8, 0.9, "", "length")),
        reward=0.1 + 0.2,
        success=True,
        ending="budget_tokens",
        text=("you see a wall", "ein Täßchen ☕"),
    )


def test_a_payload_without_forks_has_the_bytes_that_it_had_before_there_were_any() -> None:
    _, data = encode(trajectory(9))
    (header_bytes,) = struct.unpack_from("<Q", data)
    rest = json.loads(json.loads(data[8 : 8 + header_bytes])["__metadata__"]["trajectory"])
    assert list(rest) == ["id", "key", "turns", "reward", "success", "ending", "text"]


def test_forks_come_back_and_make_another_payload() -> None:
    whole = trajectory(9)
    forked = msgspec.structs.replace(whole, forks=(Fork(6, ((0, 2), (3, 4))), Fork(8, ((4, 5),))))
    sha256, data = encode(forked)
    assert_equal(decode(sha256, data, "here"), forked)
    assert sha256 != encode(whole)[0]
    assert identity(forked) != identity(whole)


def assert_equal(left: Trajectory, right: Trajectory) -> None:
    for field in msgspec.structs.fields(Trajectory):
        found, wanted = getattr(left, field.name), getattr(right, field.name)
        if isinstance(wanted, np.ndarray):
            assert found.dtype == wanted.dtype
            assert np.array_equal(found, wanted)
        else:
            assert found == wanted, field.name


@pytest.mark.parametrize("tokens", [0, 1, 9, DIRECT_TOKENS + 1])
@pytest.mark.parametrize("kind", ["file", "file_direct", "memory"])
def test_every_field_comes_back(kind: str, tokens: int, tmp_path: Path) -> None:
    async def check() -> None:
        blobs: Blobs = MemoryBlobs() if kind == "memory" else FileBlobs(tmp_path, threaded=kind == "file")
        wanted = trajectory(tokens)
        sha256 = await blobs.put(wanted)
        assert await blobs.put(wanted) == sha256
        assert await blobs.put(trajectory(tokens, number=8)) != sha256
        assert_equal(await blobs.get(sha256), wanted)
        await blobs.delete([sha256, sha256])
        with pytest.raises(CheckpointError):
            await blobs.get(sha256)

    asyncio.run(check())


def test_name_is_the_hash_of_the_file(tmp_path: Path) -> None:
    sha256 = asyncio.run(FileBlobs(tmp_path).put(trajectory(20)))
    path = tmp_path / blob_path(sha256)
    assert path.parent.name == sha256[:2]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    assert [found.name for found in tmp_path.rglob("*") if found.is_file()] == [path.name]


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_only_what_is_still_named_is_kept(kind: str, tmp_path: Path) -> None:
    async def check() -> None:
        blobs: Blobs = MemoryBlobs() if kind == "memory" else FileBlobs(tmp_path)
        kept, lost = await blobs.put(trajectory(5, 1)), await blobs.put(trajectory(5, 2))
        await blobs.keep_only({kept, "f" * 64})
        assert_equal(await blobs.get(kept), trajectory(5, 1))
        with pytest.raises(CheckpointError):
            await blobs.get(lost)

    asyncio.run(check())


def test_a_deleted_payloads_file_is_used_again_and_holds_the_new_one_only(tmp_path: Path) -> None:
    async def check() -> None:
        blobs = FileBlobs(tmp_path)
        long = await blobs.put(trajectory(500, 1))
        await blobs.delete([long, long])
        short = await blobs.put(trajectory(5, 2))
        assert [found.name for found in tmp_path.rglob("*") if found.is_file()] == [f"{short}.safetensors"]
        assert_equal(await blobs.get(short), trajectory(5, 2))
        again = await blobs.put(trajectory(500, 1))
        assert again == long
        await blobs.put(trajectory(5, 3))
        assert_equal(await blobs.get(long), trajectory(500, 1))

    asyncio.run(check())


def test_the_same_payload_after_its_deletion_is_not_overwritten_by_the_next(tmp_path: Path) -> None:
    async def check() -> None:
        blobs = FileBlobs(tmp_path)
        first, second = await blobs.put(trajectory(9, 1)), await blobs.put(trajectory(9, 2))
        await blobs.delete([first, second])
        assert await blobs.put(trajectory(9, 1)) == first
        third = await blobs.put(trajectory(9, 3))
        assert_equal(await blobs.get(first), trajectory(9, 1))
        assert_equal(await blobs.get(third), trajectory(9, 3))

    asyncio.run(check())


def test_zero_stride_arrays_can_be_stored(tmp_path: Path) -> None:
    async def check() -> None:
        flat = msgspec.structs.replace(trajectory(3), ids=np.broadcast_to(np.int32(4), (3,)))
        blobs = FileBlobs(tmp_path)
        assert (await blobs.get(await blobs.put(flat))).ids.tolist() == [4, 4, 4]

    asyncio.run(check())


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + b"?", lambda data: b""])
def test_damaged_payload_is_refused(tmp_path: Path, damage: object) -> None:
    async def check() -> None:
        blobs = FileBlobs(tmp_path)
        sha256 = await blobs.put(trajectory(20))
        path = tmp_path / blob_path(sha256)
        path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
        with pytest.raises(CheckpointError, match="damaged"):
            await blobs.get(sha256)

    asyncio.run(check())


def test_folder_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_text("a file in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        asyncio.run(FileBlobs(tmp_path / "blobs").put(trajectory(3)))
