"""A published version without a copy to the host: the trainer's GPU tensors, opened by the engines of the same host.

The other end is `engines/vllm_ipc.py`. It has not run on a GPU, and `export` does not choose it: trainers compute on
CPUs today.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiderl.data.errors import CheckpointError
from tiderl.data.records import WeightHandle
from tiderl.data.shared_weights import SUFFIX, SharedTensor, SharedWeights, encode


def share(version: int, weights: Mapping[str, Any], directory: Path) -> WeightHandle:
    """Write how to open `weights` (names -> CUDA tensors of one device). The caller keeps them alive and unchanged
    until the version is discarded. Raises `CheckpointError` where the disk refuses."""
    import torch

    tensors = tuple(_shared(name, tensor.detach().contiguous()) for name, tensor in weights.items())
    device = next(iter(weights.values())).device
    torch.cuda.synchronize(device)  # a reader may open them at once
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    path = directory / f"weights-v{version}{SUFFIX}"
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(encode(SharedWeights(uuid, tensors)))
        partial.rename(path)
    except OSError as error:
        raise CheckpointError(f"cannot write version {version}: {error}", where=str(directory)) from error
    return WeightHandle(version, str(path), path.stat().st_size)


def _shared(name: str, tensor: Any) -> SharedTensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

    _, values = reduce_tensor(tensor)
    known = dict(zip(inspect.signature(rebuild_cuda_tensor).parameters, values, strict=True))
    known |= {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "tensor_size": tuple(tensor.size()),
        "tensor_stride": tuple(tensor.stride()),
    }
    return SharedTensor(**{field: known[field] for field in SharedTensor.__struct_fields__})
