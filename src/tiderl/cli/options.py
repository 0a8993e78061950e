"""Options that several commands share, worded once."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-o", metavar="KEY=VALUE", help="Override one key, e.g. -o train.updates=20 (repeatable)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]


def print_json(values: Mapping[str, Any]) -> None:
    """One JSON object on one line of stdout."""
    sys.stdout.write(json.dumps(values, allow_nan=False) + "\n")
