"""Weights that stay on the trainer's accelerator: what another process of the host needs to open them (CUDA IPC).

The record takes the place of a weights file: a `WeightHandle` whose path ends with `SUFFIX` names a file that holds it.
Only numbers and bytes, never pickle. Knows no torch.
"""

from __future__ import annotations

import msgspec

SUFFIX = ".cuda-ipc"


class SharedTensor(msgspec.Struct, frozen=True):
    """One parameter. The fields but the first are those of torch's `rebuild_cuda_tensor`, by its names."""

    name: str  # of Hugging Face
    tensor_size: tuple[int, ...]
    tensor_stride: tuple[int, ...]
    tensor_offset: int
    dtype: str
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class SharedWeights(msgspec.Struct, frozen=True):
    """One version. Whoever shares it keeps the tensors alive until every reader has loaded them."""

    device_uuid: str  # of the GPU that holds them: a reader on another one needs peer access
    tensors: tuple[SharedTensor, ...]


def encode(weights: SharedWeights) -> bytes:
    return msgspec.msgpack.encode(weights)


def decode(data: bytes) -> SharedWeights:
    """Raises `ValueError` for what is none."""
    return msgspec.msgpack.decode(data, type=SharedWeights)
