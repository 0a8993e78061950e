"""Reward and held-out success over the updates: a page to look at, and a line of blocks for the terminal.

The page is `curves.html` in the run directory, drawn by plotly and complete in itself: it opens without a network.
Made from `metrics.jsonl`, so it shows a resumed run from its first update on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 30
SMOOTHED_UPDATES = 5
"""Updates in the drawn mean of the reward: a batch of a few groups is mostly noise."""


def sparkline(values: Sequence[float], *, low: float, high: float, width: int = SPARK_WIDTH) -> str:
    """One block a value, from `low` to `high`; more values than `width` are averaged in equal shares."""
    span = (high - low) or 1.0
    means = binned(values, width)
    return "".join(BLOCKS[min(len(BLOCKS) - 1, max(0, int((value - low) / span * len(BLOCKS))))] for value in means)


def binned(values: Sequence[float], bins: int) -> list[float]:
    """At most `bins` means of neighbours, in order, each over an equal share of the values (to within one)."""
    return [_mean(values[start:end]) for start, end in shares(len(values), bins)]


def shares(count: int, bins: int) -> list[tuple[int, int]]:
    """`count` things cut into at most `bins` equal shares: the first of each, and the one after its last."""
    bins = min(bins, count)
    return list(pairwise(round(number * count / bins) for number in range(bins + 1))) if bins else []


def read_rows(metrics: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Updates and evaluations of `metrics.jsonl`, each number once (the last line counts), in order. A line that a
    crash tore is left out. Raises `OSError`."""
    updates: dict[int, dict[str, Any]] = {}
    evals: dict[int, dict[str, Any]] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("kind") == "update":
            updates[row["update"]] = row
        elif row.get("kind") == "eval":
            evals[row["version"]] = row
    return [updates[number] for number in sorted(updates)], [evals[number] for number in sorted(evals)]


def write_curves(metrics: Path, page: Path, *, title: str) -> bool:
    """Draws `page` from `metrics`; False, and nothing, where no update was made. Raises `OSError` where the disk
    refuses."""
    updates, evals = read_rows(metrics)
    if updates:
        page.write_text(_figure(updates, evals, title).to_html(include_plotlyjs=True), encoding="utf-8")
    return bool(updates)


def _figure(updates: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]], title: str) -> Any:
    from plotly.graph_objects import Figure, Scatter

    numbers = [row["update"] for row in updates]
    rewards = [row["reward_mean"] for row in updates]
    recent = [_mean(rewards[max(0, end - SMOOTHED_UPDATES) : end]) for end in range(1, len(rewards) + 1)]
    judged = [row for row in evals if row["success"] is not None]
    figure = Figure()
    figure.add_trace(
        Scatter(x=numbers, y=rewards, name="reward of each update", mode="markers", marker={"size": 4, "opacity": 0.5})
    )
    figure.add_trace(Scatter(x=numbers, y=recent, name=f"reward, mean of {SMOOTHED_UPDATES} updates", mode="lines"))
    figure.add_trace(
        Scatter(
            x=[row["version"] for row in judged],
            y=[row["success"] for row in judged],
            name="held-out success",
            mode="lines+markers",
            customdata=[[row["successes"], row["prompts"]] for row in judged],
            hovertemplate="%{y:.3f} (%{customdata[0]} of %{customdata[1]})",
        )
    )
    figure.update_layout(
        title=title,
        xaxis_title="update",
        yaxis_title="mean reward of a trajectory; held-out success",
        template="plotly_white",
        hovermode="x unified",
        legend={"orientation": "h", "y": -0.2},
    )
    return figure


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
