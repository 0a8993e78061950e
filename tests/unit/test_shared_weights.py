"""The record of weights shared by CUDA IPC, without a GPU: what is written is what torch needs to open them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tiderl.data.errors import CheckpointError
from tiderl.data.shared_weights import SharedTensor, SharedWeights, decode, encode

SHARED = SharedTensor(
    name="model.norm.weight",
    tensor_size=(64,),
    tensor_stride=(1,),
    tensor_offset=128,
    dtype="bfloat16",
    storage_handle=b"\x00handle\xff",
    storage_size_bytes=4096,
    storage_offset_bytes=512,
    ref_counter_handle=b"/torch_1",
    ref_counter_offset=3,
    event_handle=b"event",
    event_sync_required=True,
)


def test_the_record_survives_its_bytes() -> None:
    weights = SharedWeights("GPU-1", (SHARED, SHARED))
    assert decode(encode(weights)) == weights


def test_the_record_holds_what_torch_opens_a_tensor_with() -> None:
    torch = pytest.importorskip("torch")
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    from tiderl.engines.vllm_ipc import arguments

    opened_with = arguments(SHARED, device_index=5)
    inspect.signature(rebuild_cuda_tensor).bind(**opened_with)  # every parameter once, and nothing else
    assert opened_with["storage_device"] == 5 and opened_with["requires_grad"] is False
    assert opened_with["dtype"] is torch.bfloat16
    assert opened_with["storage_handle"] == SHARED.storage_handle


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tiderl.engines.vllm_ipc import read

    path = tmp_path / "weights-v1.cuda-ipc"
    for data in (b"", b"nothing of the kind", encode(SharedWeights("GPU-1", ()))[:-1]):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read(str(path))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(str(tmp_path / "nowhere.cuda-ipc"))
