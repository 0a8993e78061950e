"""Cost constants of a real engine from its iterations: least squares, with what the fit leaves unexplained.

A sample is one iteration: sequences that sampled (b), context positions that they attended to (C), tokens prefilled
(P), seconds. The bound takes the fit's lower envelope, not its middle: a constant that is too large would be no bound.
Knows no engine and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiderl.cost.model import CostModel
from tiderl.data.errors import ConfigurationError

CONSTANTS = ("iteration_s", "sequence_s", "context_token_s", "prefill_token_s")
MIN_SAMPLES = 20
"""Five for each constant."""
ENVELOPE_QUANTILE = 0.01
"""Of measured / fitted: all but one in a hundred iterations take at least this part of what the fit says."""


@dataclass(frozen=True)
class Calibration:
    """Fitted seconds by the names of `CostModel`, and how far iterations are from them."""

    iteration_s: float
    sequence_s: float
    context_token_s: float
    prefill_token_s: float
    residual_median: float
    """Of |measured - fitted| / measured."""
    residual_p90: float
    envelope_factor: float
    """See `ENVELOPE_QUANTILE`; at most 1."""

    def applied(self, cost: CostModel) -> CostModel:
        """`cost` with the fitted constants: what a simulation should use."""
        return cost.with_constants({name: getattr(self, name) for name in CONSTANTS})

    def lower(self, cost: CostModel) -> CostModel:
        """`cost` with the constants of the lower envelope: what a bound on the real engine should use."""
        return cost.with_constants({name: self.envelope_factor * getattr(self, name) for name in CONSTANTS})


def fitted_iterations(samples: Sequence[tuple[float, float, float, float]] | np.ndarray) -> Calibration:
    """Non-negative least squares over rows (b, C, P, seconds), each weighted by 1 / seconds: relative errors count.

    Raises `ConfigurationError` for too few rows, numbers that are not finite or negative, seconds of 0, and rows that
    cannot tell the constants apart (such as one batch size only).
    """
    from scipy.optimize import nnls

    table = np.asarray(samples, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] != 4 or len(table) < MIN_SAMPLES:
        raise ConfigurationError(
            f"a calibration needs at least {MIN_SAMPLES} iterations of (b, C, P, seconds), given {table.shape}",
            where="calibration",
        )
    seconds = table[:, 3]
    impossible = np.flatnonzero(~(np.isfinite(table) & (table >= 0)).all(axis=1) | ~(seconds > 0))
    if len(impossible):
        row = int(impossible[0])
        raise ConfigurationError(f"impossible iteration {table[row].tolist()}", where=f"calibration, row {row}")
    counts = np.column_stack([np.ones(len(table)), table[:, :3]])
    used: np.ndarray = np.asarray(counts.any(axis=0))
    scale = np.where(used, counts.max(axis=0), 1.0)
    weighted = counts / scale / seconds[:, None]
    if np.linalg.matrix_rank(weighted[:, used]) < used.sum() or not used[:2].all():
        raise ConfigurationError(
            "these iterations cannot tell the constants apart",
            where="calibration",
            hint="measure several batch sizes, contexts and prefills",
        )
    constants = nnls(weighted, np.ones(len(table)))[0] / scale
    fitted = counts @ constants
    residuals = np.abs(seconds - fitted) / seconds
    iteration_s, sequence_s, context_token_s, prefill_token_s = (float(value) for value in constants)
    return Calibration(
        iteration_s,
        sequence_s,
        context_token_s,
        prefill_token_s,
        residual_median=float(np.median(residuals)),
        residual_p90=float(np.quantile(residuals, 0.9)),
        envelope_factor=min(1.0, float(np.quantile(seconds / fitted, ENVELOPE_QUANTILE))),
    )
