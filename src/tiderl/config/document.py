"""A YAML file as plain values, with the line of every key.

YAML 1.2's core types, because 1.1 turns `1e-3` into text, `no` into false and `12:30` into 750. Duplicate keys are
refused: the last one winning silently would be an option without effect (I12). Knows no key of the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

from tiderl.data.errors import ConfigurationError

Path = tuple[str | int, ...]
Spot = Callable[[int], str]
"""A line, from 1, to the place as errors name it."""


class _Loader(yaml.SafeLoader):
    """Only composes nodes; scalars get the tags of YAML 1.2's core schema."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"[-+]?[0-9]+$", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", list("-+.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


@dataclass
class Document:
    """`values` is plain data; `lines` maps the path of each key or list item to its line, from 1."""

    values: Any
    lines: dict[Path, int] = field(default_factory=dict)


def parse(text: str, *, where: str, lined: bool = True) -> Document:
    """Raises `ConfigurationError` for what is not plain YAML data; it names `where` and, if `lined`, the line."""

    def spot(line: int) -> str:
        return f"{where}:{line}" if lined else where

    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = " ".join(filter(None, (error.problem, error.context)))
        raise ConfigurationError(f"not valid YAML: {problem}", where=spot(line)) from error
    except yaml.YAMLError as error:
        problem = str(error).splitlines()[0]
        raise ConfigurationError(f"not valid YAML: {problem}", where=where) from error
    document = Document(None)
    if node is not None:
        document.values = _value(node, (), document.lines, spot, frozenset())
    return document


def _value(node: yaml.Node, path: Path, lines: dict[Path, int], spot: Spot, open_nodes: frozenset[int]) -> Any:
    line = node.start_mark.line + 1
    at = spot(line)
    lines.setdefault(path, line)
    if id(node) in open_nodes:
        raise ConfigurationError("an alias contains itself", where=at)
    inside = open_nodes | {id(node)}
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, at)
    if isinstance(node, yaml.SequenceNode) and node.tag.endswith(":seq"):
        return [_value(item, (*path, i), lines, spot, inside) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode) or not node.tag.endswith(":map"):
        raise ConfigurationError(f"the tag {node.tag!r} is not supported", where=at)
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigurationError("a key must be one word", where=spot(key_line))
        key = str(key_node.value)
        dotted = ".".join(map(str, (*path, key)))
        if key in values:
            first = lines[(*path, key)]
            raise ConfigurationError(
                f"the key {dotted} is given twice", where=spot(key_line), hint=f"first in line {first}"
            )
        lines[(*path, key)] = key_line
        values[key] = _value(value_node, (*path, key), lines, spot, inside)
    return values


def _scalar(node: yaml.ScalarNode, at: str) -> Any:
    kind = node.tag.rpartition(":")[2]
    text = str(node.value)
    match kind:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text)
        case "float":
            return float(re.sub(r"\.(inf|nan)$", r"\1", text, flags=re.IGNORECASE))
        case "str":
            return text
    raise ConfigurationError(f"the tag {node.tag!r} is not supported", where=at)
