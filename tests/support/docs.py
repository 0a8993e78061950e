"""Reading the project's Markdown: links, fenced blocks, tables, inline code.

`python tests/support/docs.py` writes the one generated table, that of the figures in `docs/metrics.md`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)


def pages() -> list[Path]:
    """Every Markdown file that is published."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return FENCE.sub("", text)


def fenced(text: str, *languages: str) -> list[str]:
    """The bodies of the fenced blocks of these languages ("" is none)."""
    return [body for language, body in FENCE.findall(text) if language in languages]


def links(text: str) -> list[str]:
    return LINK.findall(prose(text))


def inline_code(text: str) -> list[str]:
    return CODE.findall(prose(text))


def anchors(text: str) -> set[str]:
    """What a link may name after `#`, as GitHub makes it from headings."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(prose(text))}


def commands(text: str, program: str) -> Iterator[list[str]]:
    """The command lines of a program in unnamed and shell blocks, as arguments; a comment after `#` is not part of it,
    environment settings before it neither."""
    for body in fenced(text, "", "sh", "bash", "console"):
        for line in body.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True) if program in line else []
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            if words and words[0] == program:
                yield words[1:]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, the heading's included, without the line of dashes."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in prose(text).splitlines()
        if line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line)
    ]


def figures() -> str:
    """The table of `docs/metrics.md`, from the definitions."""
    from tiderl.observe.definitions import DEFINITIONS

    lines = [f"| `{key}` | {meaning.replace('|', chr(92) + '|')} |\n" for key, meaning in DEFINITIONS.items()]
    return "".join(["| key | meaning |\n", "|---|---|\n", *lines])


if __name__ == "__main__":
    page = ROOT / "docs" / "metrics.md"
    old = page.read_text(encoding="utf-8")
    table = re.search(r"(?:^\|.*\n)+", old, re.MULTILINE)
    assert table is not None
    page.write_text(old[: table.start()] + figures() + old[table.end() :], encoding="utf-8")
