"""Results of several strategies side by side, as a table for people. Made from their figures only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tiderl.observe.account import CATEGORIES
from tiderl.observe.words import NOTHING, duration, fraction, number

SMALLEST_SHARE = 0.005
"""A category of the account that takes less than this everywhere is left out."""


def comparison_table(workload: Mapping[str, Any], strategies: Mapping[str, Mapping[str, Any]]) -> RenderableType:
    """One column a strategy: its speed, staleness and learning, then where its rank-seconds went."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in strategies:
        table.add_column(name, justify="right")
    for label, cells in _rows(strategies):
        table.add_row(label, *cells)
    title = (
        f"{workload['config']}, {workload['clock']} time: {workload['ranks']} ranks, {workload['updates']} updates of "
        f"{workload['groups']} groups of {workload['group_size']}, seed {workload['seed']}"
    )
    notes = [f"{name}: {remark}" for name, result in strategies.items() for remark in result.get("no_effect") or ()]
    return Group(Text(title), table, *(Text(note, style="yellow") for note in notes))


def _rows(strategies: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    results = list(strategies.values())

    def row(label: str, key: str, show: Any = number) -> tuple[str, list[str]] | None:
        cells = [NOTHING if result.get(key) is None else show(result[key]) for result in results]
        return None if all(cell == NOTHING for cell in cells) else (label, cells)

    def differing(label: str, key: str, show: Any = number) -> tuple[str, list[str]] | None:
        return row(label, key, show) if len({str(result.get(key)) for result in results}) > 1 else None

    rows = [
        row("goodput, tokens/s", "goodput_tokens_per_s"),
        row("over the first", "goodput_ratio", lambda ratio: f"{ratio:.2f} x"),
        row("bound, tokens/s", "bound_tokens_per_s"),
        row("rho", "rho", lambda rho: f"{rho:.3f}"),
        row("rho, largest bound", "rho_common", lambda rho: f"{rho:.3f}"),
        row("rho, issue order", "rho_order", lambda rho: f"{rho:.3f}"),
        row("bound by", "binding", str),
        row("held-out success", "eval_success_last", fraction),
        row("staleness counts", "staleness_counts", str),
        row("oldest token, updates", "staleness_max", str),
        row("mean over tokens", "staleness_mean_tokens"),
        row("wait once ready, updates", "window_staleness_max", str),
        row("trainer waits", "twt_s", duration),
        row("rollout waits", "rwt_s", duration),
        differing("KV policy", "kv_policy", str),
        row("KV hits", "kv_hit_fraction", fraction),
        differing("re-prefilled tokens", "kv_reprefilled_tokens", "{:,}".format),
        differing("tasks paused", "tasks_paused", "{:,}".format),
        differing("tasks migrated", "tasks_migrated", "{:,}".format),
        differing("retention ratio", "kv_retention_ratio", lambda ratio: f"{ratio:.2f} x"),
    ]
    shares = [_shares(result) for result in results]
    account = [
        (f"  {category.replace('_', ' ')}", [f"{share.get(category, 0.0):.1%}" for share in shares])
        for category in CATEGORIES
        if any(share.get(category, 0.0) >= SMALLEST_SHARE for share in shares)
    ]
    heading = [("of all rank-seconds", [""] * len(results))] if account else []
    return [found for found in rows if found is not None] + heading + account


def _shares(result: Mapping[str, Any]) -> dict[str, float]:
    account, total = result.get("account"), result.get("account_total_rank_s")
    return {category: spent / total for category, spent in account.items()} if account and total else {}
