"""Drawing tokens: values by hand, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tiderl.data.errors import ConfigurationError, InvariantViolation
from tiderl.data.turns import Sampling
from tiderl.engines.sampling import Uniforms, check_sampling, sample

# Probabilities 1/2, 1/4, 0, 1/4: the cumulative distribution is 0.5, 0.75, 0.75, 1.
LOGITS = torch.tensor([math.log(2.0), 0.0, float("-inf"), 0.0])


@pytest.mark.parametrize(
    ("uniform", "token", "probability"),
    [
        (0.0, 0, 0.5),
        (0.49, 0, 0.5),
        (0.51, 1, 0.25),
        (0.74, 1, 0.25),
        (0.76, 3, 0.25),
        (1.0 - 2.0**-40, 3, 0.25),
    ],
)
def test_a_uniform_draws_by_the_cumulative_distribution(uniform: float, token: int, probability: float) -> None:
    ((drawn, logprob),) = sample(LOGITS[None], [1.0], [uniform])  # type: ignore[misc]
    assert drawn == token
    assert logprob == pytest.approx(math.log(probability), abs=1e-6)


def test_logprobs_are_of_the_tempered_distribution() -> None:
    # Temperature 1/2 squares the odds 2 : 1 : 1 to 4 : 1 : 1.
    ((drawn, logprob),) = sample(LOGITS[None], [0.5], [0.66])  # type: ignore[misc]
    assert (drawn, logprob) == (0, pytest.approx(math.log(4 / 6), abs=1e-6))
    ((drawn, logprob),) = sample(LOGITS[None], [0.5], [0.67])  # type: ignore[misc]
    assert (drawn, logprob) == (1, pytest.approx(math.log(1 / 6), abs=1e-6))


def test_each_row_has_its_own_temperature_and_greedy_has_logprob_zero() -> None:
    rows = LOGITS.repeat(3, 1)
    assert sample(rows, [0.0, 1.0, 0.0], [0.99, 0.99, 0.0])[0] == (0, 0.0)
    assert [draw[0] for draw in sample(rows, [0.0, 1.0, 0.0], [0.99, 0.99, 0.0]) if draw] == [0, 3, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_the_row_with_bad_logits_fails(bad: float, temperature: float) -> None:
    rows = LOGITS.repeat(2, 1)
    rows[1, 1] = bad
    good, failed = sample(rows, [temperature] * 2, [0.1, 0.1])
    assert good is not None and good[0] == 0
    assert failed is None


def test_frequencies_follow_the_probabilities() -> None:
    n = 4000
    uniforms = Uniforms(3)
    draws = sample(LOGITS.repeat(n, 1), [1.0] * n, [uniforms.next() for _ in range(n)])
    counts = np.bincount([draw[0] for draw in draws if draw], minlength=4) / n
    # Standard error of 1/2 at n = 4000 is 0.008.
    np.testing.assert_allclose(counts, [0.5, 0.25, 0.0, 0.25], atol=0.03)


def test_a_stream_depends_on_its_seed_only() -> None:
    first, second, other = Uniforms(5), Uniforms(5), Uniforms(2**63 + 5)
    other.next()
    draws = [first.next() for _ in range(4)]
    assert draws == [second.next() for _ in range(4)]
    assert other.next() not in draws


def sampling(**changes: object) -> Sampling:
    return Sampling(**({"temperature": 1.0, "max_new_tokens": 4, "stop_ids": ()} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.99},
        {"top_k": 1},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
    ],
)
def test_what_training_cannot_use_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        check_sampling(sampling(**changes))


def test_a_negative_token_count_is_refused() -> None:
    with pytest.raises(InvariantViolation):
        check_sampling(sampling(max_new_tokens=-1))
