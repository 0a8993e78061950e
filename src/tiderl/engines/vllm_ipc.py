"""Weights that a trainer of the same host shares by CUDA IPC (`data/shared_weights.py`): opened, never copied by us.

The other end is `trainers/cuda_ipc.py`. It has not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tiderl.data.errors import CheckpointError
from tiderl.data.shared_weights import SharedTensor, SharedWeights, decode


def read(path: str) -> SharedWeights:
    """Raises `CheckpointError`."""
    try:
        return decode(Path(path).read_bytes())
    except (OSError, ValueError) as damaged:
        raise CheckpointError(f"the weights cannot be read: {damaged}", where=path) from damaged


def tensors(weights: SharedWeights, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the trainer's memory, one parameter at a time: valid until the trainer discards the version."""
    for shared in weights.tensors:
        yield shared.name, _rebuilt(shared, device)


def arguments(shared: SharedTensor, device_index: int) -> dict[str, Any]:
    """Of torch's `rebuild_cuda_tensor`. `device_index`: the reader's own, whatever the trainer calls that GPU."""
    fields = {name: getattr(shared, name) for name in SharedTensor.__struct_fields__ if name != "name"}
    return fields | {
        "dtype": getattr(torch, shared.dtype),
        "tensor_cls": torch.Tensor,
        "storage_cls": torch.UntypedStorage,
        "storage_device": device_index,
        "requires_grad": False,
    }


def _rebuilt(shared: SharedTensor, device: torch.device) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    rebuilt: torch.Tensor = rebuild_cuda_tensor(**arguments(shared, device.index or 0))
    return rebuilt
