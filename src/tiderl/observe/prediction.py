"""Predicted against measured, and what a calibration left unexplained: lines of a summary for people.

Made from the result's figures only. Says nothing where a result has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiderl.observe.words import count, number

FIGURES = (
    ("step time", "step_s", "error_fraction", "s"),
    ("goodput", "goodput_tokens_per_s", "goodput_error_fraction", "tokens/s"),
    ("staleness", "staleness_mean_tokens", "staleness_error_fraction", "mean over tokens"),
)
"""Said as, name in the result, name of its error, unit."""


def prediction_lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and text of each line."""
    lines = [("predicted", text) for text in _predicted(result)]
    if result.get("recycled_groups"):
        lines.append(("", f"{count(result['recycled_groups'], 'prompt')} beyond the recorded ones: played again"))
    calibration = result.get("calibration")
    if calibration is None:
        return lines
    constants = ", ".join(f"{name} {value:.3g}" for name, value in calibration["constants"].items())
    lines.append(("calibrated", f"on {calibration['run']}: {constants}"))
    if calibration["unknown"]:
        lines.append(("", f"the run cannot tell: {', '.join(calibration['unknown'])}"))
    lines += [
        (
            "residuals",
            f"{name}: {one['rms']:.1%} rms, half within {one['p50']:.1%}, nine in ten within {one['p90']:.1%}",
        )
        for name, one in calibration["residuals"].items()
    ]
    return lines


def _predicted(result: Mapping[str, Any]) -> list[str]:
    found = []
    for said, name, error, unit in FIGURES:
        predicted, measured = result.get(f"predicted_{name}"), result.get(f"measured_{name}")
        if predicted is None:
            continue
        text = f"{said} {number(predicted)} {unit}"
        if measured is not None:
            text += f", measured {number(measured)} ({result[error]:.1%} off)"
        found.append(text)
    return found
