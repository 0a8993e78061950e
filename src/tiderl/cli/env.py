"""`tiderl env`: list the environments, check one before a run is spent on it, play one by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tiderl.cli.options import AsJson, print_json

app = typer.Typer(
    help="List, check and play environments.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A registered name, ./mine.py:Mine or package.module:Class.", show_default=False
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option("-o", metavar="KEY=VALUE", help="Option of the environment, e.g. -o level=BabyAI-GoToLocal-v0."),
]

MaxTurns = Annotated[int, typer.Option("--max-turns", min=1, help="As rollout.max_turns.")]
DeadlineS = Annotated[float, typer.Option("--deadline-s", min=0.01, help="As env.deadline_s.")]
PromptNumber = Annotated[int, typer.Option("--prompt", min=0, help="Which training prompt comes first.")]


@app.command("list")
def list_environments(as_json: AsJson = False) -> None:
    """The registered environments and what they need."""
    from importlib.util import find_spec

    from tiderl.envs.registry import REGISTRY

    installed = {e.name: e.package is None or find_spec(e.package) is not None for e in REGISTRY.values()}
    if as_json:
        rows = [
            {"name": e.name, "summary": e.summary, "extra": e.extra, "installed": installed[e.name]}
            for e in REGISTRY.values()
        ]
        print_json({"environments": rows})
        return
    width = max(map(len, REGISTRY))
    for entry in REGISTRY.values():
        need = "" if installed[entry.name] else f"  (needs: pip install 'tiderl[{entry.extra}]')"
        print(f"{entry.name.ljust(width)}  {entry.summary}{need}")
    print("Your own: ./mine.py:Mine or package.module:Class; see tiderl env check --help.")


@app.command("check")
def check_environment(
    name: Name,
    option: Options = None,
    max_turns: MaxTurns = 16,
    deadline_s: DeadlineS = 30.0,
    as_json: AsJson = False,
) -> None:
    """Try an environment against the protocol before a run is spent on it.

    tiderl env check ./mine.py:Mine -o level=2

    Loading, task sets, the expert's success, determinism (in two processes), unknown actions, leaks of memory, threads
    and processes, vocabulary, seconds. Exit code 1 if it breaks a promise, 2 if there is no such environment.
    """
    from dataclasses import asdict

    from tiderl.envs.check import check

    report = check(name, parse_options(option or []), max_turns=max_turns, deadline_s=deadline_s)
    if as_json:
        findings = [asdict(finding) for finding in report.findings]
        print_json({"name": name, "ok": report.ok, "findings": findings, "figures": dict(report.figures)})
    else:
        print("\n".join(report.lines()))
        print(f"{name}: {'fit for training' if report.ok else 'breaks promises that training relies on'}")
    if not report.ok:
        raise typer.Exit(1)


@app.command("play")
def play_environment(name: Name, option: Options = None, prompt: PromptNumber = 0) -> None:
    """Play by hand what the agent will play.

    tiderl env play builtin
    """
    from tiderl.envs.play import play

    reward = play(name, parse_options(option or []), input, print, first_prompt=prompt)
    print(f"reward in all: {reward:g}")


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` with the value as YAML, as for every `-o`. Raises `ConfigurationError`."""
    from tiderl.config.document import parse
    from tiderl.data.errors import ConfigurationError

    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigurationError("an option is written KEY=VALUE", where=f"-o {text}")
        options[key] = parse(value, where=f"-o {text}", lined=False).values
    return options
