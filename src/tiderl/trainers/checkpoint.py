"""A trainer's state in a folder: weights, optimizer, reference, counters; restored, it continues bit for bit.

Tensors are safetensors, counters JSON, never pickle; the folder appears whole or not at all. The trainer draws no
random number after its warm-up (models run without dropout, and every stream is named): no generator state is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiderl.data.errors import CheckpointError
from tiderl.trainers.folders import whole_folder

FORMAT = 1
WEIGHTS, OPTIMIZER, REFERENCE, STATE = "weights", "optimizer", "reference", "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW keeps per parameter


def save_checkpoint(
    directory: str,
    *,
    model: Any,
    reference: Any | None,
    optimizer: torch.optim.Optimizer,
    optimizer_steps: int,
) -> None:
    """Write the folder whole, in place of one that exists. Raises `CheckpointError` where the disk refuses."""
    with whole_folder(directory) as folder:
        _write(folder, WEIGHTS, _parameters(model))
        _write(folder, OPTIMIZER, _moments(model, optimizer))
        if reference is not None:
            _write(folder, REFERENCE, _parameters(reference))
        state = {"format": FORMAT, "optimizer_steps": optimizer_steps, "has_reference": reference is not None}
        (folder / STATE).write_text(json.dumps(state))


def load_checkpoint(directory: str, *, model: Any, reference: Any | None, optimizer: torch.optim.Optimizer) -> int:
    """Load into the given objects and return the number of optimizer steps. `reference` None: none is wanted.

    Everything is read and compared before anything is changed. Raises `CheckpointError` for a folder that is missing,
    damaged, of another model, or without the reference that is wanted.
    """
    folder = Path(directory)
    try:
        state = json.loads((folder / STATE).read_text())
        steps, has_reference = int(state["optimizer_steps"]), bool(state["has_reference"])
        if state["format"] != FORMAT:
            raise CheckpointError(f"checkpoint format {state['format']} is not {FORMAT}", where=directory)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"not a trainer checkpoint: {error!r}", where=directory) from error
    if reference is not None and not has_reference:
        raise CheckpointError(
            "the checkpoint holds no reference model",
            where=directory,
            hint="it was written with algorithm.kl_coef 0: resume with that, or start a new run",
        )
    weights = _read(folder, WEIGHTS, _shapes(model))
    moments = _read(folder, OPTIMIZER, _moment_shapes(model) if steps else {})
    frozen = {} if reference is None else _read(folder, REFERENCE, _shapes(reference))
    _copy(weights, model)
    if reference is not None:
        _copy(frozen, reference)
    _load_moments(model, optimizer, moments)
    return steps


def _parameters(model: Any) -> dict[str, Tensor]:
    """Every parameter once: a tied output head is its embedding."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _shapes(model: Any) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in _parameters(model).items()}


def _moment_shapes(model: Any) -> dict[str, torch.Size]:
    shapes = _shapes(model)
    return {
        f"{moment}.{name}": torch.Size([]) if moment == "step" else shape
        for moment in MOMENTS
        for name, shape in shapes.items()
    }


def _copy(source: dict[str, Tensor], model: Any) -> None:
    for name, parameter in _parameters(model).items():
        parameter.copy_(source[name])


def _moments(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def _load_moments(model: Any, optimizer: torch.optim.Optimizer, moments: dict[str, Tensor]) -> None:
    optimizer.state.clear()
    if moments:  # none before the first optimizer step
        for name, parameter in model.named_parameters():
            kept = {moment: moments[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS}
            optimizer.state[parameter] = kept


def _write(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({key: value.to("cpu").contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors")


def _read(folder: Path, name: str, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The tensors of one file, which must have these names and shapes."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / f"{name}.safetensors"
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read: {error}", where=str(path)) from error
    if {key: tensor.shape for key, tensor in tensors.items()} != shapes:
        raise CheckpointError("the checkpoint is of another model: names or shapes differ", where=str(path))
    return tensors
