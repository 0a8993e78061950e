"""`tiderl sim FILE --swarm N --seed S`: shows a swarm while it runs, and what it found.

Every failing seed is printed with its reason and the one command that shows it again. Exit code 1 when one failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from tiderl.cli.options import print_json
from tiderl.data.errors import ConfigurationError

SHOWN = 3
"""Violations printed of one seed; the rest follows from them, and all are in the JSON object."""


def run_swarm(
    config: Path,
    overrides: Sequence[str],
    count: int,
    first_seed: int,
    as_json: bool,
    *,
    given: bool = False,
    **options: Any,
) -> None:
    """`given`: an option was given that does not go with a swarm. `options`: as `api.swarm.swarm` takes them. Raises
    `typer.Exit` with 1 for violations, and where a large swarm never saw what it should."""
    if given:
        raise ConfigurationError("--save and --dry-run do not go with --swarm", hint="try: tiderl sim --help")
    from rich.console import Console
    from rich.progress import Progress

    from tiderl.api.swarm import swarm
    from tiderl.sim.swarm import SeedReport

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("seeds", total=count)

        def show(seed: SeedReport) -> None:
            progress.advance(bar)
            if seed.violations:
                console.print(f"seed {seed.seed} failed:", *seed.violations[:SHOWN], sep="\n  ", markup=False)

        report = swarm(config, range(first_seed, first_seed + count), overrides, on_seed=show, **options)
    found = report.to_json(overrides=overrides)
    out = Console(stderr=as_json, highlight=False, soft_wrap=True)
    out.print(_summary(found), markup=False)
    if as_json:
        print_json(found)
    if report.failed or report.never():
        raise typer.Exit(1)


def _summary(found: dict[str, Any]) -> str:
    """Some lines for people."""
    faults, violations, never = found["faults"], found["violations"], found["never"]
    struck = sum(count > 0 for count in faults.values())
    lines = [
        f"{found['seeds']} seeds from {found['first_seed']}, {len(violations)} failed; "
        f"{found['virtual_s']:.4g} virtual seconds, {found['events']} events, {found['drivers']} drivers",
        f"faults: {sum(faults.values())} of {struck} kinds in {len(faults)}; the slowest took "
        f"{found['liveness_fraction_max']:.0%} of its time after calm",
    ]
    lines += [f"never seen: {', '.join(never)}"] if never else []
    lines += [f"again: {violation['replay']}" for violation in violations]
    lines += [f"note: {text}" for text in found["no_effect"]]
    return "\n".join(lines)
