"""Log-probs of the loss-bearing tokens under a model: the one place where the trainer turns logits into probabilities.

The same temperature as the engine's: `log_softmax(logits / temperature)`. Logits are computed only where a loss-bearing
token is predicted; on agent trajectories that is a small share of all positions. Knows nothing of losses or updates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tiderl.trainers.packing import Chunk, Packed

LOGITS_PER_SLICE = 2**25
"""At most this many logits are alive at once (128 MiB in float32); beyond, slices are computed again in backward."""


def score(
    model: Any,
    packed: Packed,
    temperature: float,
    compute_dtype: torch.dtype,
    logits_per_slice: int = LOGITS_PER_SLICE,
) -> tuple[Tensor, Tensor]:
    """Log-prob (with gradient, where enabled) and entropy (without) of each loss-bearing token.

    Both float32 [K], in flat order, on the model's device.
    """
    device = next(model.parameters()).device
    head = model.get_output_embeddings()
    slice_rows = max(1, logits_per_slice // head.weight.shape[0])
    logprobs, entropies = [torch.zeros(0, device=device)], [torch.zeros(0, device=device)]
    for chunk in packed.chunks:
        hidden = _hidden_states(model, chunk, device, compute_dtype)
        targets = torch.from_numpy(chunk.targets).to(device)
        recompute = len(hidden) > slice_rows and torch.is_grad_enabled()
        for part, wanted in zip(hidden.split(slice_rows), targets.split(slice_rows), strict=True):
            arguments = (head, part, wanted, temperature, compute_dtype)
            scored = checkpoint(_score_rows, *arguments, use_reentrant=False) if recompute else _score_rows(*arguments)
            logprobs.append(scored[0])
            entropies.append(scored[1])
    order = torch.from_numpy(packed.order).to(device)
    return torch.cat(logprobs)[order], torch.cat(entropies)[order]


def _hidden_states(model: Any, chunk: Chunk, device: torch.device, compute_dtype: torch.dtype) -> Tensor:
    """The last hidden state before each loss-bearing token of the chunk. [N, hidden]"""
    ids = torch.from_numpy(chunk.ids).to(device)
    rows, columns = (torch.from_numpy(index).to(device) for index in (chunk.rows, chunk.columns))
    with _autocast(device, compute_dtype):
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state[rows, columns]


def _score_rows(
    head: Any, hidden: Tensor, targets: Tensor, temperature: float, compute_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    with _autocast(hidden.device, compute_dtype):
        logits = head(hidden)
    distribution = functional.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def _autocast(device: torch.device, compute_dtype: torch.dtype) -> torch.autocast:
    """Weights stay float32; matrix products run in `compute_dtype`."""
    return torch.autocast(device.type, dtype=compute_dtype, enabled=compute_dtype != torch.float32)
