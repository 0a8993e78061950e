"""`tiderl init`: writes commented files to begin with. Never overwrites; writes all of them or none."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import typer

from tiderl.data.errors import ConfigurationError

What = Annotated[Literal["babyai", "env"], typer.Argument(metavar="[babyai|env]", help="What to begin with.")]

TEMPLATES = {
    "babyai": {"babyai.yaml": "babyai.yaml"},
    "env": {"mine.py": "mine.py.txt", "mine.yaml": "mine.yaml"},
}
"""File to write, and the template it is a copy of."""
NEXT = {
    "babyai": ("tiderl train babyai.yaml",),
    "env": ("tiderl env check ./mine.py:Mine", "tiderl train mine.yaml"),
}


def init(what: What = "babyai") -> None:
    """Write files to begin with into the current folder: a configuration (babyai), or an environment of your own with
    its configuration (env).

    tiderl init env
    """
    taken = [name for name in TEMPLATES[what] if Path(name).exists()]
    if taken:
        raise ConfigurationError(
            f"{' and '.join(taken)} {'is' if len(taken) == 1 else 'are'} there already",
            where="tiderl init",
            hint="nothing was written; move it away, or go to another folder",
        )
    for name, template in TEMPLATES[what].items():
        text = (files("tiderl.cli") / "templates" / template).read_text(encoding="utf-8")
        try:
            with Path(name).open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigurationError(f"{name} cannot be written: {error.strerror}", where="tiderl init") from error
        print(f"wrote {name}")
    for command in NEXT[what]:
        print(f"next: {command}")
