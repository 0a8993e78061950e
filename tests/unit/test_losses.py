import math

import pytest
import torch

from tiderl.trainers import losses


def logs(*ratios: float) -> torch.Tensor:
    """Log-probs whose ratios to a log-prob of 0 are these."""
    return torch.tensor([math.log(ratio) for ratio in ratios], requires_grad=True)


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n)


def test_grpo_takes_the_smaller_of_free_and_clipped_gain():
    current = logs(1.5, 0.5, 1.5, 0.5, 1.1)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    terms = losses.grpo(current, zeros(5), advantages, clip_low=0.2, clip_high=0.3)
    # min(1.5, 1.3), min(0.5, 0.8), min(-1.5, -1.3), min(-0.5, -0.8), min(2.2, 2.2), each negated
    assert terms.loss.tolist() == pytest.approx([-1.3, -0.5, 1.5, 0.8, -2.2])
    assert terms.clipped.tolist() == [True, False, False, True, False]
    assert terms.ratio.tolist() == pytest.approx([1.5, 0.5, 1.5, 0.5, 1.1])
    assert terms.weight.tolist() == [1.0] * 5
    assert terms.capped.tolist() == [False] * 5


def test_a_clipped_token_has_no_gradient_and_a_free_one_minus_ratio_times_advantage():
    current = logs(1.5, 0.5, 1.5)
    losses.grpo(current, zeros(3), torch.tensor([1.0, 1.0, -1.0]), 0.2, 0.2).loss.sum().backward()
    # d(-r A)/d(log r) = -r A
    assert current.grad.tolist() == pytest.approx([0.0, -0.5, 1.5])


def test_decoupled_ppo_weighs_the_clipped_surrogate_by_the_truncated_weight():
    # proximal/behaviour: 3 (cut to 2), 0.5, 1.5. current/proximal: 1.1, 1.5 (cut to 1.2), 0.5 (cut to 0.8).
    proximal = logs(3.0, 0.5, 1.5).detach()
    current = (proximal + logs(1.1, 1.5, 0.5).detach()).requires_grad_()
    terms = losses.decoupled_ppo(current, proximal, zeros(3), torch.tensor([1.0, 1.0, -1.0]), 0.2, 0.2, weight_cap=2.0)
    assert terms.loss.tolist() == pytest.approx([-2 * 1.1, -0.5 * 1.2, 1.5 * 0.8])
    assert terms.weight.tolist() == pytest.approx([2.0, 0.5, 1.5])
    assert terms.capped.tolist() == [True, False, False]
    assert terms.clipped.tolist() == [False, True, True]
    terms.loss.sum().backward()
    assert current.grad.tolist() == pytest.approx([-2 * 1.1, 0.0, 0.0])


def test_with_its_own_forward_as_proximal_the_clip_does_not_act_and_the_weight_does():
    current = logs(3.0, 0.5)
    terms = losses.decoupled_ppo(current, current.detach(), zeros(2), torch.tensor([1.0, -2.0]), 0.2, 0.2, 2.0)
    assert terms.ratio.tolist() == [1.0, 1.0]
    assert not terms.clipped.any()
    terms.loss.sum().backward()
    # -w A: the weight carries no gradient of its own
    assert current.grad.tolist() == pytest.approx([-2.0 * 1.0, -0.5 * -2.0])


def test_k3_by_hand():
    # reference/current = 2, 1/2, 1: x - log x - 1
    current = torch.zeros(3, requires_grad=True)
    kl = losses.kl_k3(current, logs(2.0, 0.5, 1.0).detach())
    assert kl.tolist() == pytest.approx([2 - math.log(2) - 1, 0.5 + math.log(2) - 1, 0.0])
    kl.sum().backward()
    assert current.grad.tolist() == pytest.approx([1 - 2.0, 1 - 0.5, 0.0])


def test_impossible_tokens_keep_every_loss_finite():
    current = torch.tensor([-1e4, 0.0], requires_grad=True)
    other = torch.tensor([0.0, -1e4])
    advantages = torch.tensor([-1.0, -1.0])
    for loss in (
        losses.grpo(current, other, advantages, 0.2, 0.2).loss,
        losses.decoupled_ppo(current, other, current.detach(), advantages, 0.2, 0.2, 2.0).loss,
        losses.kl_k3(current, other),
    ):
        assert torch.isfinite(loss).all()
