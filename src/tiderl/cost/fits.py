"""Least squares for seconds: no negative constant, and fitted seconds that add up to the measured ones.

Knows no run and no engine: columns of counts in, constants and what they leave unexplained out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROUNDS = 8
"""Of counting iterations and fitting, and of weighting: both settle in three or four."""
ROUNDING = 1e-9
"""A constant that explains less of all seconds than this is 0."""
LOW_QUANTILE = 0.01
"""Of measured ÷ fitted seconds: all but one piece of work in a hundred are above it."""


@dataclass(frozen=True)
class Residual:
    """Of one fit: how far pieces of work are from their fitted seconds, relative to what is fitted."""

    pieces: int
    rms: float
    """Weighted by fitted seconds."""
    p50: float
    p90: float
    low: float = 1.0
    """All but one in a hundred pieces took at least this part of their fitted seconds; at most 1."""

    def to_json(self) -> dict[str, float]:
        return {"pieces": self.pieces, "rms": self.rms, "p50": self.p50, "p90": self.p90}


def conserving_fit(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Non-negative constants, float64 [k], of `features` @ constants ~ `seconds`, whose sums agree.

    `features` float64 [n, k]. Weighted least squares with weights 1 / fitted, renewed until they settle: the score
    equations of a quasi-Poisson model (McCullagh and Nelder, 1989), whose solution keeps the total. Columns that
    depend on earlier ones get 0.
    """
    from scipy.optimize import nnls

    scale = np.maximum(features.max(axis=0), np.finfo(np.float64).tiny)
    used = _independent(features / scale)
    columns = features[:, used] / scale[used]
    fitted = np.full(len(seconds), seconds.mean())
    for _ in range(ROUNDS):
        weights = 1 / np.sqrt(np.maximum(fitted, 1e-6 * seconds.mean() + np.finfo(np.float64).tiny))
        solution = nnls(columns * weights[:, None], seconds * weights)[0]
        fitted = columns @ solution
    solution[columns.sum(axis=0) * solution < ROUNDING * seconds.sum()] = 0.0
    constants = np.zeros(features.shape[1])
    constants[used] = solution / scale[used]
    return constants


def residual(seconds: np.ndarray, fitted: np.ndarray) -> Residual:
    """Relative to the fitted seconds; pieces that are fitted with none are left out."""
    some = fitted > 0
    off = np.abs(seconds[some] - fitted[some]) / fitted[some]
    rms = float(np.sqrt(np.average(off**2, weights=fitted[some]))) if some.any() else 0.0
    p50, p90 = (float(np.quantile(off, q)) for q in (0.5, 0.9)) if some.any() else (0.0, 0.0)
    low = float(np.quantile(seconds[some] / fitted[some], LOW_QUANTILE)) if some.any() else 1.0
    return Residual(len(seconds), rms, p50, p90, min(1.0, max(0.0, low)))


def _independent(features: np.ndarray) -> list[int]:
    """Columns that are not 0 and no combination of earlier ones."""
    kept: list[int] = []
    for column in range(features.shape[1]):
        trial = [*kept, column]
        if np.linalg.matrix_rank(features[:, trial]) == len(trial):
            kept = trial
    return kept
