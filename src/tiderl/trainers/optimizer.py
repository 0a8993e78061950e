"""AdamW and gradients, as both the warm-up and the updates use them.

The summed gradient becomes a mean here, in one division (I7). Knows nothing of losses.
"""

from __future__ import annotations

from typing import Any

import torch

BETAS = (0.9, 0.999)
"""The second moment remembers the whole of a short run. Over 20 steps (0.95) it forgets: after a stretch of groups of
equal rewards, whose gradient is nearly zero, the next real gradient became a step of several times the learning
rate."""
RISE_STEPS = 5
"""The learning rate rises over the first steps: Adam's second moment knows little then, its steps are full-sized."""


def make_optimizer(model: Any, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """One group over all parameters; the fused implementation, on CPU as on GPU."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=weight_decay, fused=True)


def lr_at(step: int, lr: float) -> float:
    """The learning rate of optimizer step `step` (from 0)."""
    return lr * min(1.0, (step + 1) / RISE_STEPS)


def clipped_mean_gradient(model: Any, loss_tokens: int, max_norm: float) -> float:
    """Divide the summed gradients in place, clip them to `max_norm`; the Euclidean norm between the two is returned."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    torch._foreach_div_([parameter.grad for parameter in parameters], float(loss_tokens))
    return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
