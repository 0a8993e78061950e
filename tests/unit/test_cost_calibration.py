"""Calibration: constants that made the samples are found again, noise is reported, the envelope stays below."""

from __future__ import annotations

import numpy as np
import pytest

from tiderl.cost import cost_model
from tiderl.cost.calibration import CONSTANTS, ENVELOPE_QUANTILE, fitted_iterations
from tiderl.data.errors import ConfigurationError
from tiderl.data.settings import ModelSettings

TRUE = np.array([7.5e-3, 4e-5, 3e-8, 3.5e-5])


def samples(count: int = 400, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    batch = rng.integers(1, 64, count)
    table = np.column_stack([batch, batch * rng.integers(100, 4000, count), rng.integers(0, 2048, count)])
    seconds = np.column_stack([np.ones(count), table]) @ TRUE
    return np.column_stack([table, seconds * np.exp(noise * rng.standard_normal(count))])


def test_constants_without_noise_are_found_exactly() -> None:
    fit = fitted_iterations(samples())
    assert [getattr(fit, name) for name in CONSTANTS] == pytest.approx(TRUE)
    assert fit.residual_p90 < 1e-9 and fit.envelope_factor == pytest.approx(1.0)


def test_with_noise_the_residuals_say_how_much_and_the_envelope_is_below() -> None:
    table = samples(count=2000, noise=0.1)
    fit = fitted_iterations(table)
    assert [getattr(fit, name) for name in CONSTANTS] == pytest.approx(TRUE, rel=0.15)
    # The median of |x| of a normal is 0.674 of its deviation.
    assert fit.residual_median == pytest.approx(0.0674, rel=0.1)
    cost = fit.lower(cost_model("H100", ModelSettings("scratch", 1024, 512, 0, (1,))))
    lower = np.column_stack([np.ones(len(table)), table[:, :3]]) @ [getattr(cost, name) for name in CONSTANTS]
    assert (lower <= table[:, 3]).mean() == pytest.approx(1 - ENVELOPE_QUANTILE, abs=0.002)


def test_no_constant_becomes_negative() -> None:
    table = samples()
    table[:, 3] = 0.01  # an engine whose iterations all take the same time
    fit = fitted_iterations(table)
    assert fit.iteration_s == pytest.approx(0.01)
    assert min(getattr(fit, name) for name in CONSTANTS) >= 0


def test_iterations_that_never_prefilled_leave_that_constant_at_zero() -> None:
    table = samples()
    table[:, 3] -= table[:, 2] * TRUE[3]
    table[:, 2] = 0
    fit = fitted_iterations(table)
    assert fit.prefill_token_s == 0.0
    assert fit.sequence_s == pytest.approx(TRUE[1])


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 20"):
        fitted_iterations(samples(count=19))
    same = samples()
    same[:, 0], same[:, 1] = 8, 800
    with pytest.raises(ConfigurationError, match="apart"):
        fitted_iterations(same)
    for bad in (np.nan, -1.0, 0.0):
        table = samples()
        table[7, 3] = bad
        with pytest.raises(ConfigurationError, match="impossible iteration") as caught:
            fitted_iterations(table)
        assert "row 7" in str(caught.value)
