"""The losses, each a short pure function over one value per loss-bearing token. [K] float32 tensors throughout.

Nothing here sums, averages or masks: padding and prompt tokens never arrive, and the division is the update's (I7).
Words: *behaviour* is the policy that sampled, at its token's version; *proximal* the trainer's policy before this
update; *current* the one being trained; *reference* the start model. Knows nothing of models, batches or optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Ratios stay within exp(±20), so that one impossible token cannot make a loss infinite."""


@dataclass(frozen=True)
class PolicyTerms:
    """A policy loss per token and what its metrics need. All [K]; only `loss` carries gradient."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor  # bool: the clip cut this token's gradient
    weight: Tensor  # importance weight on the loss, 1 where the loss has none
    capped: Tensor  # bool: that weight was cut at its cap


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """`-min(r A, clip(r, 1-low, 1+high) A)` and where the clipped branch was the smaller one."""
    free = ratio * advantages
    cut = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return -torch.minimum(free, cut), (cut < free).detach()


def grpo(current: Tensor, behaviour: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyTerms:
    """GRPO's clipped surrogate against the behaviour policy (DeepSeekMath, arXiv 2402.03300; PPO, arXiv 1707.06347).

    `loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(current - behaviour)`.
    """
    ratio = _ratio(current, behaviour)
    loss, clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    ones = torch.ones_like(behaviour)
    return PolicyTerms(loss, ratio.detach(), clipped, ones, ones < 0)


def decoupled_ppo(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    weight_cap: float,
) -> PolicyTerms:
    """Decoupled PPO for stale tokens (AReaL, arXiv 2505.24298), its importance weight truncated per token.

    `loss = -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(current - proximal)` and
    `w = min(exp(proximal - behaviour), weight_cap)`, a constant. Where proximal is `current` itself, detached, r is 1,
    the clip does not act, and the gradient is that of truncated importance sampling: `-w A d(current)`.
    """
    untruncated = _ratio(proximal, behaviour).detach()
    weight = untruncated.clamp(max=weight_cap)
    ratio = _ratio(current, proximal.detach())
    loss, clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return PolicyTerms(weight * loss, ratio.detach(), clipped, weight, untruncated > weight_cap)


def kl_k3(current: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(current ‖ reference) per sampled token: `exp(d) - d - 1` with `d = reference - current`.

    Never negative, 0 where both agree (J. Schulman, "Approximating KL divergence", 2020; used so by GRPO).
    """
    difference = (reference - current).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1.0
