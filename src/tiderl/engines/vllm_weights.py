"""New weights for vLLM through its weight-transfer interface: a backend that reads what a `WeightHandle` names.

On a CPU vLLM packs each linear layer's weight and keeps only the packed copy, so a load goes through vLLM's layerwise
reload; a tied head keeps its packed copy of the *old* embedding even then, and is packed again here.

On GPUs the same backend and calls serve; vLLM's layerwise reload copies in place, so captured CUDA graphs stay valid.
The handle chooses the way: a safetensors file is read straight to the device, from any host that sees it; a record of
shared GPU memory (CUDA IPC, same host) is opened and copied on the device. Neither way has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tiderl.data.errors import CheckpointError
from tiderl.data.shared_weights import SUFFIX
from tiderl.engines import vllm_ipc

FILE_BACKEND = "tiderl_file"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: a file needs no connection."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """What the handle names, and which of its names each parameter is read from."""

    path: str
    sources: dict[str, str]


class FileWeights(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """vLLM's worker-side end: start, read the file, finish. The driver of these three calls is `load`."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        return

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        if update_info.path.endswith(SUFFIX):
            renamed = {source: name for name, source in update_info.sources.items()}
            shared = vllm_ipc.tensors(vllm_ipc.read(update_info.path), self.device)
            self.model.load_weights((renamed[name], tensor) for name, tensor in shared if name in renamed)
            return
        with safe_open(update_info.path, framework="pt", device=str(self.device)) as file:
            self.model.load_weights(_tensors(file, update_info.sources))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_tied_head(self.model, self.model_config)

    def shutdown(self) -> None:
        return


def register() -> None:
    """Make the file backend known to vLLM; once a process."""
    if FILE_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(FILE_BACKEND, FileWeights)


def load(llm: Any, path: str, shapes: Mapping[str, tuple[int, ...]], version: int) -> None:
    """Replace the weights of a vLLM engine by those of a file, and commit `version`.

    `shapes`: what the model needs, by Hugging Face name. Raises `CheckpointError`, with the old weights still in use,
    for a file that is missing, damaged or of another model.
    """
    sources = check_file(path, shapes)
    llm.collective_rpc("start_weight_update")
    try:
        llm.collective_rpc("update_weights", args=({"path": path, "sources": sources},))
    except (OSError, SafetensorError) as damaged:  # between the check and the load
        raise CheckpointError(f"the weights cannot be read: {damaged}", where=path) from damaged
    llm.collective_rpc("finish_weight_update")
    llm.set_weight_version(str(version))


def check_file(path: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Which name of the file each parameter is read from. Raises `CheckpointError`. A tied head may be there or not,
    and may stand for the embedding."""
    found = _shapes_in(path)
    sources = {name: name for name in shapes}
    tied = HEAD not in shapes
    if tied and EMBEDDING not in found:
        sources[EMBEDDING] = HEAD
    missing = sorted(set(sources.values()) - found.keys())
    surplus = sorted(found.keys() - set(sources.values()) - ({HEAD} if tied else set()))
    if missing or surplus:
        raise CheckpointError(
            f"the weights are of another model: missing {missing[:3]}, unknown {surplus[:3]}", where=path
        )
    for name, source in sources.items():
        if found[source] != shapes[name]:
            raise CheckpointError(f"{name} has shape {found[source]}, the model has {shapes[name]}", where=path)
    return sources


def _shapes_in(path: str) -> dict[str, tuple[int, ...]]:
    if path.endswith(SUFFIX):
        return {shared.name: shared.tensor_size for shared in vllm_ipc.read(path).tensors}
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 no mapping
    except (OSError, SafetensorError) as damaged:
        raise CheckpointError(f"the weights cannot be read: {damaged}", where=path) from damaged


def _tensors(file: Any, sources: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, source in sources.items():
        yield name, file.get_tensor(source)


def _repack_tied_head(model: torch.nn.Module, config: Any) -> None:
    """vLLM 0.32 leaves a tied head on the packed copy of the old embedding: log-probs were off by 0.7 without this."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    if getattr(config.hf_config, "tie_word_embeddings", False):
        dispatch_cpu_unquantized_gemm(model.lm_head, False)
