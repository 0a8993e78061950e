"""The memory limit of an environment, and what `env check` finds left behind."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from support.environments_suite import key

from tiderl.data.errors import EnvironmentMemory
from tiderl.data.records import Action, Prompt
from tiderl.envs.check import check
from tiderl.envs.findings import Report
from tiderl.envs.pool import build_environments

pytestmark = pytest.mark.live

HEAD = """
import os, subprocess, sys, threading, time
import numpy as np
from tiderl import Environment, Prompt, Step

class Mine(Environment):
    memory_limit_bytes = 200 * 2**20
    kept = []
    @classmethod
    def prompts(cls, split, **options):
        return [Prompt(f"{split}-{number}", number, {"split": split}) for number in range(4)]
    def reset(self, prompt):
        return "go"
    def step(self, action):
        self.do(action.text)
        return Step("done", 1.0, terminated=True)
    def do(self, what):
"""
EATS = """
        if what == "list":
            held = []
            while True: held.append(bytearray(2**20))
        if what == "array":
            np.ones(400 * 2**20 // 8)
        if what == "children":  # each within the limit
            code = "import time; held = bytearray(b'x') * (100 * 2**20); time.sleep(60)"
            for child in [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]: child.wait()
"""


def written(tmp_path: Path, body: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + body)
    return f"{path}:Mine"


@pytest.mark.parametrize("isolation", ["process", "pool"])
@pytest.mark.parametrize("what", ["list", "children"])
def test_who_takes_more_memory_than_it_may_ends_as_a_typed_fault_and_the_next_one_goes_on(
    tmp_path: Path, isolation: str, what: str
) -> None:
    asyncio.run(_eats(written(tmp_path, EATS), isolation, what))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux refuses an allocation past the limit")
def test_one_large_allocation_is_refused_before_it_is_made(tmp_path: Path) -> None:
    asyncio.run(_eats(written(tmp_path, EATS), "process", "array"))


async def _eats(name: str, isolation: str, what: str) -> None:
    environments = build_environments(isolation, name, {}, workers=1, slots=2, deadline_s=30.0)  # type: ignore[arg-type]
    try:
        await environments.start()
        greedy, neighbour = [await environments.open(key(number), Prompt("p", number)) for number in range(2)]
        await greedy.reset()
        if isolation == "process":
            await neighbour.reset()
        with pytest.raises(EnvironmentMemory, match="more memory than it may"):
            await greedy.step(Action(what))
        await greedy.close()
        if isolation == "pool":
            await neighbour.reset()  # in a new worker
        assert (await neighbour.step(Action("go"))).terminated
        await neighbour.close()
    finally:
        await environments.close()


def leaks(report: Report) -> tuple[str, str]:
    return next((finding.verdict, finding.detail) for finding in report.findings if finding.promise == "leaks")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("        self.kept.append(b'x' * 100_000)", "KiB of memory"),
        ("        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "1.0 threads"),
        ("        subprocess.Popen(['sleep', '600'])", "1.0 processes"),
    ],
)
def test_what_every_episode_leaves_behind_is_found(tmp_path: Path, body: str, says: str) -> None:
    report = check(written(tmp_path, body), {}, deadline_s=20.0)
    verdict, detail = leaks(report)
    assert verdict == "problem" and says in detail
    assert not report.ok


def test_what_is_taken_once_is_no_leak(tmp_path: Path) -> None:
    body = """
        if len(self.kept) < 2:
            self.kept.append(b"x" * 30_000_000)
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
    verdict, detail = leaks(check(written(tmp_path, body), {}, deadline_s=20.0))
    assert verdict == "ok", detail
