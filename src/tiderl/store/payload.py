"""One trajectory as bytes: a safetensors file whose single metadata entry holds all that is no array.

Equal trajectories give equal bytes, so the SHA-256 of the bytes names the content. Never pickle.
"""

from __future__ import annotations

import hashlib
import json
import struct

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tiderl.data.errors import CheckpointError
from tiderl.data.forks import Fork
from tiderl.data.records import Ending, TaskKey, Trajectory, TurnSpan

_ARRAYS = {"ids": np.int32, "loss_mask": np.bool_, "logprobs": np.float32, "versions": np.int32}


class _Rest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a `Trajectory` that are no arrays. A payload without forks has the bytes that it had before there
    were any."""

    id: int
    key: TaskKey
    turns: tuple[TurnSpan, ...]
    reward: float
    success: bool
    ending: Ending
    text: tuple[str, ...]
    forks: tuple[Fork, ...] = ()


def encode(trajectory: Trajectory) -> tuple[str, bytes]:
    """(SHA-256 in hex, the file's bytes)."""
    rest = _rest_of(trajectory)
    arrays: dict[str, np.ndarray] = {
        name: np.ascontiguousarray(getattr(trajectory, name), dtype) for name, dtype in _ARRAYS.items()
    }
    data = save(arrays, {"trajectory": msgspec.json.encode(rest).decode()})
    return hashlib.sha256(data).hexdigest(), data


def identity(trajectory: Trajectory) -> str:
    """A SHA-256 of all but the arrays, of which only the length counts: for simulated payloads, whose arrays have none
    of the content and may be long."""
    return hashlib.sha256(msgspec.json.encode((_rest_of(trajectory), trajectory.tokens))).hexdigest()


def _rest_of(trajectory: Trajectory) -> _Rest:
    return _Rest(*(getattr(trajectory, name) for name in _Rest.__struct_fields__))


def decode(sha256: str, data: bytes, where: str) -> Trajectory:
    """The inverse. Raises `CheckpointError` when the bytes are not those that the name promises."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise CheckpointError(f"the payload is damaged: its SHA-256 is {found}", where=where)
    try:
        (header_bytes,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + header_bytes])
        rest = msgspec.json.decode(header["__metadata__"]["trajectory"], type=_Rest)
        arrays = load(data)
        fields = {name: getattr(rest, name) for name in _Rest.__struct_fields__}
        return Trajectory(**fields, **{name: arrays[name] for name in _ARRAYS})
    except (struct.error, SafetensorError, msgspec.DecodeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the payload is no trajectory: {error}", where=where) from error
