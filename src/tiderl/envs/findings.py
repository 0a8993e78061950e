"""What checking an environment comes to: findings, and the figures behind them. Must not know how they came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One promise and what came of it."""

    promise: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True)
class Report:
    """All findings, and the figures behind them: seconds, words, turns, fractions."""

    name: str
    findings: tuple[Finding, ...]
    figures: Mapping[str, float]

    @property
    def ok(self) -> bool:
        return all(finding.verdict != "problem" for finding in self.findings)

    def lines(self) -> list[str]:
        """One line a finding, problems marked."""
        marks = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}
        return [f"{marks[finding.verdict]}  {finding.promise}: {finding.detail}" for finding in self.findings]
