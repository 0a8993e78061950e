"""`tiderl compare`: several strategies on one workload, side by side."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from tiderl.cli.options import AsJson, ConfigFile, Overrides, print_json

Strategies = Annotated[
    str,
    typer.Option(
        "--strategies",
        metavar="A,B,…",
        help="Which to compare; the first is what others are set against. areal+ctb and areal+lru set the KV policy.",
    ),
]
Live = Annotated[bool, typer.Option("--live", help="Train for real, each strategy in turn, instead of simulating.")]


def compare(
    config: ConfigFile,
    strategies: Strategies = "sync,areal",
    override: Overrides = None,
    live: Live = False,
    as_json: AsJson = False,
) -> None:
    """Run one workload under several strategies, simulated or live, and set them side by side.

    tiderl compare examples/babyai.yaml --strategies sync,areal -o cluster.ranks=32
    """
    from rich.console import Console

    from tiderl.api.compare import compare as run
    from tiderl.observe.comparison import comparison_table

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(stderr=True, highlight=False)
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    with console.status("") as status:

        def show(text: str) -> None:
            if console.is_terminal:
                status.update(f"compare: {text}")
            else:
                console.print(f"compare: {text}", markup=False, soft_wrap=True)

        found = run(config, names, override or [], live=live, progress=show)
    if as_json:
        print_json(found.to_json())
        return
    Console(file=sys.stdout, highlight=False).print(comparison_table(found.workload, found.strategies))
