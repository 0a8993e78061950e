"""A run's profile as tables: one for each host, its spans by their share of the time.

Made from what `profile.json` says. Knows nothing of how it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tiderl.observe.words import NOTHING, count, duration

SHOWN_FRACTION = 0.005
"""Of a host's time: spans below it share one row."""
Totals = Mapping[str, Mapping[str, Any]]


def render_profile(profile: Mapping[str, Any]) -> RenderableType:
    """What `api.load_run(run).profile` gives."""
    updates = profile["updates"]
    window = f"{duration(profile['wall_s'])} from the first prompt to the last of {count(updates, 'update')}"
    head = Text.assemble(("where the time went", "bold"), f": {window}, set-up left out")
    return Group(head, *(_table(name, host, updates) for name, host in profile["hosts"].items()))


def _table(name: str, host: Mapping[str, Any], updates: int) -> Table:
    processes = f", {host['processes']} processes" if host["processes"] > 1 else ""
    busy = f"CPU {_share(host['cpu_s'], host['wall_s'])}"
    table = Table(box=SIMPLE_HEAD, title=f"{name} ({busy}{processes})", title_justify="left", title_style="bold")
    table.add_column("span", min_width=24)
    for column in ("share", "ms/update", "CPU ms/update", "times/update"):
        table.add_column(column, justify="right")
    for row in _rows(host["spans"], host["wall_s"], updates):
        table.add_row(*row)
    for row in _rows(host["beside"], host["wall_s"], updates):
        table.add_row(f"+ {row[0]}", *row[1:], style="dim")
    return table


def _rows(totals: Totals, wall_s: float, updates: int) -> Iterator[tuple[str, ...]]:
    """The largest first, then all small ones as one."""
    small = [name for name, total in totals.items() if total["wall_s"] < SHOWN_FRACTION * wall_s]
    for name, total in totals.items():
        if name not in small:
            yield name, *_cells(total, wall_s, updates)
    if small:
        sums = {key: sum(totals[name][key] for name in small) for key in ("wall_s", "cpu_s", "count")}
        yield f"{len(small)} more", *_cells(sums, wall_s, updates)


def _cells(total: Mapping[str, Any], wall_s: float, updates: int) -> tuple[str, ...]:
    if not updates:
        return _share(total["wall_s"], wall_s), NOTHING, NOTHING, NOTHING
    return (
        _share(total["wall_s"], wall_s),
        f"{1000 * total['wall_s'] / updates:,.1f}",
        f"{1000 * total['cpu_s'] / updates:,.1f}",
        f"{total['count'] / updates:,.1f}",
    )


def _share(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s:.1%}" if whole_s > 0 else NOTHING
