"""`tiderl doctor`: prints what `observe.doctor` found, and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

from tiderl.cli.options import AsJson, print_json

MARKS = {"ok": "ok  ", "note": "note", "fail": "FAIL"}

Quick = Annotated[bool, typer.Option("--quick", help="Start no process and import no torch.")]


def doctor(as_json: AsJson = False, quick: Quick = False) -> None:
    """Check this machine: Python, memory, shared memory, packages, torch, child processes.

    Exit code 1 if something is missing that every run needs.
    """
    from tiderl.observe.doctor import examine

    findings = examine(quick=quick)
    healthy = all(finding.status != "fail" for finding in findings)
    if as_json:
        print_json({"ok": healthy, "checks": [finding.as_dict() for finding in findings]})
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{MARKS[finding.status]}  {finding.name.ljust(width)}  {finding.detail}")
            for number, line in enumerate(finding.hint.splitlines()):
                print(f"{' ' * (width + 8)}{'   ' if number else '-> '}{line}")
    if not healthy:
        raise typer.Exit(1)
