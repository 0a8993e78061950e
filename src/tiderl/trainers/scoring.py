"""Log-probs of the loss-bearing tokens under a model: the one place where the trainer turns logits into probabilities.

The same temperature as the engine's: `log_softmax(logits / temperature)`. Logits are computed only where a loss-bearing
token is predicted, once where several sequences continue there; on agent trajectories that is a small share of all
positions. Knows nothing of losses or updates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tiderl.trainers.packing import Packed
from tiderl.trainers.padding import Chunk
from tiderl.trainers.row_model import row_hidden_states
from tiderl.trainers.rows import Row

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
    for call in packed.calls:
        hidden = _hidden_states(model, call, device, compute_dtype)
        predicted_by, targets = (torch.from_numpy(a).to(device) for a in (call.targets.predicted_by, call.targets.ids))
        recompute = len(hidden) > slice_rows and torch.is_grad_enabled()
        starts = np.arange(0, len(hidden), slice_rows)
        counts = np.diff(np.searchsorted(call.targets.predicted_by, [*starts, len(hidden)])).tolist()
        slices = (hidden.split(slice_rows), predicted_by.split(counts), targets.split(counts))
        for start, part, rows, wanted in zip(starts.tolist(), *slices, strict=True):
            arguments = (head, part, rows - start, wanted, temperature, compute_dtype)
            scored = checkpoint(_score_rows, *arguments, use_reentrant=False) if recompute else _score_rows(*arguments)
            logprobs.append(scored[0])
            entropies.append(scored[1])
    order = torch.from_numpy(packed.order).to(device)
    return torch.cat(logprobs)[order], torch.cat(entropies)[order]


def _hidden_states(model: Any, call: Chunk | Row, device: torch.device, compute_dtype: torch.dtype) -> Tensor:
    """The last hidden states that predict loss-bearing tokens of the call. [U, hidden]"""
    with _autocast(device, compute_dtype):
        if isinstance(call, Row):
            return row_hidden_states(model, call, device, compute_dtype)
        hidden = model.base_model(input_ids=torch.from_numpy(call.ids).to(device), use_cache=False).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, torch.from_numpy(call.targets.predictors).to(device))


def _score_rows(
    head: Any, hidden: Tensor, predicted_by: Tensor, targets: Tensor, temperature: float, compute_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`hidden` [U, hidden] predicts N targets, each by the row that `predicted_by` names. Two [N]."""
    with _autocast(hidden.device, compute_dtype):
        logits = head(hidden)
    distribution = functional.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution[predicted_by, targets], entropy[predicted_by]


def _autocast(device: torch.device, compute_dtype: torch.dtype) -> torch.autocast:
    """Weights stay float32; matrix products run in `compute_dtype`."""
    return torch.autocast(device.type, dtype=compute_dtype, enabled=compute_dtype != torch.float32)
