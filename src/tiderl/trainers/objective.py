"""What is minimised, per loss-bearing token: the chosen policy loss plus `kl_coef` times the KL to the reference.

Also what the metrics of `metrics.py` are made of. Nothing is summed or divided here (I7). Knows nothing of models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiderl.data.settings import TrainerSettings
from tiderl.trainers import losses


def token_terms(
    settings: TrainerSettings,
    *,
    current: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    entropy: Tensor,
    proximal: Tensor | None,
    reference: Tensor | None,
) -> dict[str, Tensor]:
    """One [K] tensor for each of `metrics.MEANS`; `loss` carries the gradient. All arguments are float32 [K].

    `proximal` None: `current` itself, detached. `reference` None: no KL.
    """
    if settings.loss == "grpo":
        policy = losses.grpo(current, behaviour, advantages, settings.clip_low, settings.clip_high)
    else:
        policy = losses.decoupled_ppo(
            current,
            current.detach() if proximal is None else proximal,
            behaviour,
            advantages,
            settings.clip_low,
            settings.clip_high,
            settings.importance_weight_cap,
        )
    kl = torch.zeros_like(current) if reference is None else losses.kl_k3(current, reference)
    return {
        "loss": policy.loss + settings.kl_coef * kl,
        "policy_loss": policy.loss,
        "kl_ref": kl,
        "entropy": entropy,
        "ratio_mean": policy.ratio,
        "clip_fraction": policy.clipped,
        "importance_weight_mean": policy.weight,
        "importance_weight_capped_fraction": policy.capped,
        "advantage_abs_mean": advantages.abs(),
    }
