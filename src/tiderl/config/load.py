"""A configuration file and `-o` overrides to a typed `Config`, with the origin and place of every key.

Keeps the first half of I12: nothing that was written is ignored. A wrong key or value is one `ConfigurationError` with
file, line, dotted key, what was given and what is expected. Knows single keys only; combinations are `check.py`'s.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tiderl.config import document
from tiderl.config.schema import (
    RESERVED,
    SECTIONS,
    TAGS,
    Config,
    Section,
    SimWorkloadConfig,
    WaitConfig,
    WrongInside,
    known_keys,
)
from tiderl.data.errors import ConfigurationError

HINTS: Mapping[str, str] = {
    "rollout.temperature": "the log-probs of a greedy policy have no gradient; choose 1.0 if unsure",
    "train.lr": "3.0e-4 is the default",
}


@dataclass(frozen=True)
class Loaded:
    """A typed configuration and where each of its keys came from."""

    config: Config
    path: Path
    origins: Mapping[str, str]
    """Dotted leaf key to `default`, `file` or `-o` (`strategy` is added by `resolve`)."""
    set_keys: frozenset[str]
    """Dotted leaf keys that the file or `-o` gave."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Dotted key to `file:line`, or the text of its `-o`."""

    def where(self, key: str) -> str:
        """Where to change `key`: its place, else that of the nearest enclosing key, else the file."""
        while key:
            if key in self.places:
                return self.places[key]
            key = key.rpartition(".")[0]
        return str(self.path)

    def refuse(self, key: str, what: str, hint: str = "") -> ConfigurationError:
        """The error for a value of `key` that cannot be."""
        return ConfigurationError(f"{key}: {what}", where=self.where(key), hint=hint)


def load_config(path: str | Path, overrides: Sequence[str] = (), *, text: str | None = None) -> Loaded:
    """Read `path` (or `text` in its name), apply `overrides` (`a.b=value`, a YAML value), check every key by itself.

    Raises `ConfigurationError` naming file and line, or the override.
    """
    path = Path(path)
    parsed = document.parse(_read(path) if text is None else text, where=str(path))
    values = {} if parsed.values is None else parsed.values
    if not isinstance(values, dict):
        raise ConfigurationError("the file must be a mapping of keys such as `seed: 0`", where=f"{path}:1")
    places = {".".join(map(str, key)): f"{path}:{line}" for key, line in parsed.lines.items() if key}
    overridden = _apply(values, overrides, places)
    _refuse_reserved(values, places, path)
    values = {name: value for name, value in values.items() if value is not None or name not in SECTIONS}
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise _explain(error, values, places, path) from None
    set_keys = frozenset(key for key, _ in leaves(values))
    origins = {
        key: "default" if key not in set_keys else "-o" if _within(key, overridden) else "file"
        for key, _ in leaves(dump(config))
    }
    return Loaded(config, path, origins, set_keys & origins.keys(), places)


def dump(config: Config) -> dict[str, Any]:
    """The configuration as plain YAML values, in the file's order; `load_config` of it gives `config` again."""
    values = config.model_dump()
    for env in values["env"] if isinstance(values["env"], list) else [values["env"]]:
        wait = env["wait"]
        env["wait"] = "none" if wait is None else {**wait, "tail_s": list(wait["tail_s"])}
    if values["rollout"]["image_window"] is None:
        values["rollout"]["image_window"] = "none"
    return values


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is not itself a mapping of keys; an empty mapping is a leaf."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError("no such configuration file", where=str(path), hint=_similar_files(path)) from None
    except UnicodeDecodeError:
        raise ConfigurationError("not a text file in UTF-8", where=str(path)) from None
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", where=str(path)) from None


def _similar_files(path: Path) -> str:
    folder = path.parent
    names = (
        sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")) if folder.is_dir() else []
    )
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {folder / close[0]}?" if close else ""


def _apply(values: dict[str, Any], overrides: Sequence[str], places: dict[str, str]) -> set[str]:
    """Write each override into `values`; returns the dotted keys written."""
    written: set[str] = set()
    for override in overrides:
        where = f"-o {override}"
        key, equals, text = override.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            raise ConfigurationError(
                "an override is written KEY=VALUE", where=where, hint="for example: -o train.updates=20"
            )
        inner = values
        for depth, name in enumerate(names[:-1], start=1):
            below = inner.get(name)
            if isinstance(below, list):
                raise ConfigurationError(
                    f"{'.'.join(names[:depth])} is a list", where=where, hint=f"give the whole list: -o '{name}=[…]'"
                )
            if not isinstance(below, dict):
                places[".".join(names[:depth])] = where
            inner[name] = dict(below) if isinstance(below, dict) else {}
            inner = inner[name]
        inner[names[-1]] = document.parse(text, where=where, lined=False).values
        dotted = ".".join(names)
        for old in [place for place in places if place.startswith(f"{dotted}.")]:
            del places[old]
        places[dotted] = where
        written.add(dotted)
    return written


def _within(key: str, parents: set[str]) -> bool:
    return any(key == parent or key.startswith(f"{parent}.") for parent in parents)


def _refuse_reserved(values: Mapping[str, Any], places: Mapping[str, str], path: Path) -> None:
    for key, reason in RESERVED.items():
        section, _, name = key.rpartition(".")
        inner = values.get(section) if section else values
        if isinstance(inner, Mapping) and name in inner:
            raise ConfigurationError(f"{key}: {reason}", where=places.get(key, str(path)))


def _explain(error: ValidationError, values: object, places: Mapping[str, str], path: Path) -> ConfigurationError:
    """The first mistake in the file's order, unknown keys first: a misspelt key also makes a required one missing."""
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    detail = details[0]
    # A choice of alternatives puts its tag behind the key.
    key = ".".join(str(part) for part in detail["loc"] if part not in TAGS)
    where = next((places[at] for at in _outward(key) if at in places), str(path))
    if detail["type"] == "extra_forbidden":
        return ConfigurationError(f"unknown key {key}", where=where, hint=_did_you_mean(key))
    what, hint = _wrong_value(detail)
    separator = ":" if detail["type"] == "not_yet_supported" else ""
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return ConfigurationError(f"{key}{separator} {what}{more}", where=where, hint=hint or HINTS.get(key, ""))


def _outward(key: str) -> Iterator[str]:
    while key:
        yield key
        key = key.rpartition(".")[0]


def _did_you_mean(key: str) -> str:
    key = re.sub(r"^env\.\d+", "env", key)  # of a mixture
    section, _, name = key.rpartition(".")
    models: dict[str, type[Section]] = {
        "": Config,
        "env.wait": WaitConfig,
        "sim.workload": SimWorkloadConfig,
        **SECTIONS,
    }
    siblings = list(models.get(section, Config).model_fields)
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return f"did you mean {f'{section}.' if section else ''}{close[0]}?"
    elsewhere = [known for known in known_keys() if known.rpartition(".")[2] == name]
    elsewhere = elsewhere or difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.75)
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"known keys{f' of {section}' if section else ''}: {', '.join(siblings)}"


_EXPECTED: Mapping[str, str] = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list of two numbers",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping of keys",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
}


def _wrong_value(detail: ErrorDetails) -> tuple[str, str]:
    """What is expected and what was given, and a hint."""
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return "is required", ""
    if kind == "not_yet_supported":
        return detail["msg"], ""
    if kind == "value_error" and isinstance(context["error"], WrongInside):
        return str(context["error"]), context["error"].hint
    if kind == "value_error":
        return f"{context['error']}, given {_shown(given)}", ""
    if kind == "literal_error":
        allowed = str(context["expected"])
        names = [name.strip("'") for name in allowed.replace(" or ", ", ").split(", ")]
        close = difflib.get_close_matches(str(given), names, n=1)
        return f"must be {allowed}, given {_shown(given)}", f"did you mean {close[0]!r}?" if close else ""
    if kind in _EXPECTED:
        return f"{_EXPECTED[kind].format(**context)}, given {_shown(given)}", ""
    return f"{detail['msg'].lower()}, given {_shown(given)}", ""


def _shown(value: object) -> str:
    """The value as it would be written, with the type's name where the look does not tell it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) < 60 else f"the text {value[:57]!r}…"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else str(value)
