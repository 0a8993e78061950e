"""Figures as people read them: rates, fractions, durations, and a dash for what has no meaning yet."""

from __future__ import annotations

NOTHING = "–"


def number(value: float | None, digits: int = 2) -> str:
    """`1,234` from a hundred on, else with `digits` decimals."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{digits}f}"


def fraction(value: float | None) -> str:
    """A success or hit fraction with three decimals, as the results have it."""
    return NOTHING if value is None else f"{value:.3f}"


def duration(seconds: float | None) -> str:
    """`12.3 s`, `4:05`, `1:02:03`."""
    if seconds is None:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count(amount: int, what: str) -> str:
    """`1 update`, `2 updates`."""
    return f"{amount:,} {what}{'' if amount == 1 else 's'}"
