"""The documents say what is true: links, commands, keys, figures and files that they name exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from support.docs import ROOT, anchors, commands, fenced, figures, inline_code, links, pages, rows

from tiderl.api.result import make_result
from tiderl.cli.main import app
from tiderl.config.load import dump, leaves, load_config
from tiderl.config.machine import prepare
from tiderl.config.render import flow
from tiderl.config.resume import resume_overrides
from tiderl.config.schema import RESERVED, SECTIONS, Config, known_keys
from tiderl.data.events import EvalFinished, UpdateCommitted
from tiderl.observe.definitions import DEFINITIONS
from tiderl.observe.metrics import RunMetrics, eval_row

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.yaml"))
KEY = re.compile(rf"(?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+")
FILE_SUFFIXES = (".yaml", ".jsonl", ".json", ".sqlite", ".safetensors", ".md", ".py")
FOREIGN_WORDS = re.compile(r"\b(?:session|helper|subagent)s?\b", re.IGNORECASE)
UPDATE = UpdateCommitted(
    t_s=2.0,
    update=1,
    groups=1,
    trajectories=2,
    loss_tokens=4,
    tokens=20,
    reward_mean=0.5,
    success_fraction=0.5,
    staleness_max=0,
    staleness_mean_tokens=0.0,
    window_staleness_max=0,
    seconds=1.0,
    metrics={},
)
EVAL = EvalFinished(t_s=1.0, version=0, prompts=2, successes=1, failed=0, reward_mean=0.5, turns_mean=3.0, seconds=1.0)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


page = pytest.mark.parametrize("path", pages(), ids=named)


@page
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    broken = []
    for link in links(text_of(path)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        there = (path.parent / target).resolve() if target else path
        if not there.exists() or (anchor and anchor not in anchors(text_of(there))):
            broken.append(link)
    assert broken == []


@page
def test_files_of_the_project_that_are_named_exist(path: Path) -> None:
    places = (ROOT, ROOT / "src" / "tiderl", path.parent)
    packages = {folder.name for folder in places[1].iterdir() if folder.is_dir()}
    missing = []
    for code in inline_code(text_of(path)):
        is_path = re.fullmatch(r"[\w.-]+(?:/[\w.-]+)+/?", code)
        if not is_path or code.split("/")[0] not in {*packages, "src", "tests", "docs", "examples", "bench"}:
            continue
        if not any((place / code).exists() for place in places):
            missing.append(code)
    assert missing == []


@page
def test_every_configuration_key_that_is_named_exists(path: Path) -> None:
    known = {*known_keys(), *RESERVED}
    wait = {f"env.wait.{name}" for name in ("kind", "median_s", "sigma", "tail_fraction", "tail_s")}
    unknown = []
    for code in inline_code(text_of(path)):
        found = KEY.match(code)
        if found is None or code.endswith(FILE_SUFFIXES) or found.group().startswith("env.options."):
            continue
        unknown += [] if found.group() in known | wait else [code]
    assert unknown == []


@page
def test_every_configuration_that_is_shown_is_one(path: Path, tmp_path: Path) -> None:
    for number, body in enumerate(fenced(text_of(path), "yaml")):
        shown = tmp_path / f"{number}.yaml"
        shown.write_text(body, encoding="utf-8")
        prepare(shown, command="train")


def parsed(arguments: list[str]) -> Any:
    """The context of the innermost command, its options and arguments converted; raises what the command line would
    print."""
    command: Any = typer.main.get_command(app)
    name, parent = "tiderl", None
    while True:
        context = command.make_context(name, list(arguments), parent=parent)
        if not hasattr(command, "resolve_command"):
            return context
        name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        parent = context


@page
def test_every_command_line_that_is_shown_works(path: Path) -> None:
    """Parsed by the command itself; files are there, and the overrides of a configuration resolve."""
    for arguments in commands(text_of(path), "tiderl"):
        context = parsed(arguments)
        given = context.params
        overrides = [text for text in given.get("override") or [] if "…" not in text]
        config = given.get("config")
        if config is not None and str(config).endswith(".yaml"):
            virtual = context.info_name == "sim" or (context.info_name == "compare" and not given.get("live"))
            command = "sim" if virtual else "train"
            prepare(ROOT / config, overrides, command=command)
        elif context.info_name == "train":
            resume_overrides(overrides)


@pytest.mark.parametrize("arguments", [["train", "--frobnicate"], ["frobnicate"], ["env", "paint"], ["show"]])
def test_a_command_line_that_does_not_exist_would_be_noticed(arguments: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing"):
        parsed(arguments)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("command", ["train", "sim"])
def test_an_example_resolves_and_so_do_the_commands_in_its_comments(name: str, command: Any) -> None:
    example = ROOT / "examples" / name
    assert prepare(example, command=command).no_effect == ()
    shown = re.findall(r"^#\s+(tiderl .*)$", text_of(example), re.MULTILINE)
    assert shown
    for arguments in commands(
        "\n".join(["```", *(re.sub(r" {4,}\S.*$", "", line) for line in shown), "```"]), "tiderl"
    ):
        context = parsed(arguments)
        assert str(context.params["config"]) == f"examples/{name}"
        used = "sim" if context.info_name == "sim" else "train"
        assert prepare(ROOT / context.params["config"], context.params["override"] or [], command=used).no_effect == ()


def test_the_wait_profile_in_the_example_s_comment_is_one(tmp_path: Path) -> None:
    comment = re.search(r"# (wait: \{.*\})", text_of(ROOT / "examples" / "babyai.yaml"))
    assert comment
    shown = tmp_path / "wait.yaml"
    shown.write_text(f"env:\n  {comment.group(1)}\n", encoding="utf-8")
    assert load_config(shown).config.env.wait is not None


def test_the_table_of_keys_is_the_schema() -> None:
    table = {row[0].strip("`"): row for row in rows(text_of(ROOT / "docs" / "configuration.md")) if len(row) == 4}
    del table["key"]
    defaults = dict(leaves(dump(Config())))
    assert list(table) == [key for key in known_keys() if key not in SECTIONS]
    shown = {key: row[1].strip("`") for key, row in table.items()}
    assert shown == {key: flow(defaults[key]) if key in defaults else "{}" for key in table}


def test_every_name_that_a_key_takes_is_in_the_table() -> None:
    table = {row[0].strip("`"): row for row in rows(text_of(ROOT / "docs" / "configuration.md")) if len(row) == 4}
    for section, model in SECTIONS.items():
        for name, choices in model.model_json_schema()["properties"].items():
            for choice in [*choices.get("enum", []), *([choices["const"]] if "const" in choices else [])]:
                assert f"`{choice}`" in table[f"{section}.{name}"][2], (section, name, choice)


def test_the_table_of_figures_is_the_result() -> None:
    """`python tests/support/docs.py` writes it again."""
    table = {row[0].strip("`"): row[1] for row in rows(text_of(ROOT / "docs" / "metrics.md"))}
    result = make_result(
        RunMetrics(), {}, [], run_dir=None, wall_s=0.0, driver_load_fraction=None, events=0, log_sha256=None
    )
    assert {key: table.get(key) for key in DEFINITIONS} == {row[0].strip("`"): row[1] for row in rows(figures())[1:]}
    assert set(result.to_json()) - set(table) == set()


def test_the_lines_of_the_metrics_file_are_described() -> None:
    described = {code for row in rows(text_of(ROOT / "docs" / "metrics.md")) for code in re.findall(r"`(\w+)`", row[0])}
    metrics = RunMetrics()
    metrics.observe(UPDATE)
    assert {*metrics.update_row(UPDATE), *eval_row(EVAL)} - described == {"kind"}


def test_every_decision_is_in_the_index_with_its_status() -> None:
    folder = ROOT / "docs" / "decisions"
    index = {row[1]: row[2] for row in rows(text_of(folder / "README.md"))[1:]}
    files = sorted(path for path in folder.glob("*.md") if path.name != "README.md")
    found = {}
    for number, path in enumerate(files, 1):
        head = re.match(r"# (\d{4}) (.+)\n\n- Status: (.+)\n- Date: \d{4}-\d\d-\d\d\n", text_of(path))
        assert head, path.name
        assert path.name.startswith(f"{number:04d}-") and head.group(1) == f"{number:04d}"
        sections = re.findall(r"^## (.+)$", text_of(path), re.MULTILINE)
        assert sections == ["Context", "Decision", "Alternatives", "Consequences"]
        found[f"[{head.group(2)}]({path.name})"] = head.group(3)
    assert index == found


@pytest.mark.parametrize("path", [*pages(), *sorted((ROOT / "examples").rglob("*.yaml")), ROOT / "Makefile"], ids=named)
def test_the_texts_speak_of_the_product_only(path: Path) -> None:
    assert FOREIGN_WORDS.findall(text_of(path)) == []


@page
def test_lines_are_not_longer_than_code_s(path: Path) -> None:
    """Tables, links and what a program printed cannot be broken."""
    text = text_of(path)
    printed = {line for body in fenced(text, "text") for line in body.splitlines()}
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|") and "](" not in line]
    assert [line for line in long if line not in printed] == []
