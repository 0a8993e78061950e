"""`--dry-run`: the resolved configuration as a YAML file, each key with the origin of its value.

The text is itself a configuration: loading it gives the same run, whatever defaults a later version has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tiderl.config import document
from tiderl.config.load import dump, leaves
from tiderl.config.resolve import Resolved

_PLAIN = re.compile(r"(?:[A-Za-z/]|\.(?![0-9]))[A-Za-z0-9_./-]*(?::[A-Za-z0-9_./-]+)*")
_WORDS = ("true", "false", "null", ".nan", ".inf")
COMMENT_COLUMN = 48


def render_dry_run(resolved: Resolved) -> str:
    """The text, and at its end what has no effect."""
    written = dict(leaves(dump(resolved.loaded.config)))
    lines = [f"# {resolved.loaded.path}, resolved; every key with the origin of its value"]
    for key, value in dump(resolved.config).items():
        if isinstance(value, Mapping):
            lines.append(f"{key}:")
            lines += _block(value, f"{key}.", "  ", resolved.origins, written)
        else:
            lines += _block({key: value}, "", "", resolved.origins, written)
    lines += [f"# {item}" for item in resolved.no_effect]
    return "\n".join(lines) + "\n"


def derived_keys(path: Path) -> list[str]:
    """Of a file with the text above: the keys whose value was `auto` or the strategy's, dotted. An item of a list is
    none."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = document.parse(text, where=str(path)).lines
    marks = ("(auto)", "# strategy")
    return [".".join(map(str, key)) for key, line in found.items() if key and lines[line - 1].endswith(marks)]


def _block(
    values: Mapping[str, Any],
    prefix: str,
    indent: str,
    origins: Mapping[str, str],
    written: Mapping[str, Any],
) -> list[str]:
    lines: list[str] = []
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{flow(name)}:")
            lines += _block(value, f"{key}.", indent + "  ", origins, written)
            continue
        origin = origins.get(key, "default")
        was_auto = written.get(key) == "auto" and value != "auto" and origin != "strategy"
        lines.append(
            f"{indent}{flow(name)}: {flow(value)}".ljust(COMMENT_COLUMN)
            + f"  # {origin}{' (auto)' if was_auto else ''}"
        )
    return lines


def flow(value: object) -> str:
    """One value on one line, read back as the same value and type."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float() if not math.isfinite(value):
            return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
        case int() | float():
            return repr(value)
        case str() if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
            return value
        case str():
            return yaml.safe_dump(value, default_style='"', width=math.inf).strip()
        case Mapping():
            return "{" + ", ".join(f"{flow(name)}: {flow(inner)}" for name, inner in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(flow(inner) for inner in value) + "]"
    raise TypeError(f"a configuration holds no {type(value).__name__}")
