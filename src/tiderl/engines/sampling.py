"""Drawing tokens: temperature, then the inverse of the cumulative distribution at one uniform per token.

A turn's uniforms come from its own counter-based stream, so its draws never depend on what else is in the batch.
Knows logits and numbers; nothing of turns, rows or KV.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tiderl.data.errors import ConfigurationError, InvariantViolation
from tiderl.data.turns import Sampling

UNIFORMS_AHEAD = 32  # drawn in one call: a call of the generator costs many times a number
LARGEST_UNIFORM = 1.0 - 2.0**-40  # times a sum of probabilities it stays below that sum in float64


def check_sampling(sampling: Sampling) -> None:
    """Raises `ConfigurationError` for what training cannot use, `InvariantViolation` for a negative token count."""
    if sampling.top_p < 1.0 or sampling.top_k > 0:
        raise ConfigurationError(
            f"top_p {sampling.top_p} and top_k {sampling.top_k} cut the distribution that training must know",
            where="sampling",
            hint="use top_p 1.0 and top_k 0; lower rollout.temperature instead",
        )
    if not 0.0 <= sampling.temperature < float("inf"):
        raise ConfigurationError(f"temperature {sampling.temperature} is not a number from 0 up", where="sampling")
    if sampling.max_new_tokens < 0:
        raise InvariantViolation(f"max_new_tokens is {sampling.max_new_tokens}", where="sampling")


class Uniforms:
    """The uniforms of one turn: the n-th call gives the n-th number of the stream named by `seed`."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed & 0xFFFF_FFFF_FFFF_FFFF))
        self._ahead: list[float] = []  # the next ones, last first

    def next(self) -> float:
        if not self._ahead:
            self._ahead = np.minimum(self._generator.random(UNIFORMS_AHEAD), LARGEST_UNIFORM)[::-1].tolist()
        return self._ahead.pop()


def sample(logits: Tensor, temperatures: list[float], uniforms: list[float]) -> list[tuple[int, float] | None]:
    """One (token, log-prob) per row of `logits` (float32 [rows, vocabulary]); None where the logits are not finite.

    Log-probs are natural, of the distribution sampled from: softmax(logits / temperature). Temperature 0 is greedy:
    all mass on the largest logit (the first of equals), so its log-prob is 0.
    """
    controls = torch.tensor([temperatures, uniforms], dtype=torch.float64).to(logits.device, non_blocking=True)
    greedy = controls[0] == 0.0
    scale = torch.where(greedy, 1.0, controls[0]).to(torch.float32)
    probabilities = torch.softmax(logits / scale[:, None], dim=-1)
    cumulative = torch.cumsum(probabilities, dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]  # not finite where any logit is NaN or +inf
    drawn = torch.searchsorted(cumulative, controls[1][:, None] * total, right=True)
    tokens = drawn.clamp_(max=logits.shape[-1] - 1)
    if 0.0 in temperatures:
        tokens = torch.where(greedy[:, None], logits.argmax(dim=-1, keepdim=True), tokens)
    chosen = torch.where(greedy[:, None], 0.0, probabilities.gather(-1, tokens).log())
    packed = torch.cat([tokens.to(torch.float64), chosen.to(torch.float64), total], dim=1)  # one transfer a step
    return [(int(token), logprob) if np.isfinite(mass) else None for token, logprob, mass in packed.tolist()]
