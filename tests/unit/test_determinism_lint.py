"""`schedule`, `runtime` and `sim` hold nothing that could differ between two runs (I10), and the lint would see it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.determinism_lint import violations

SOURCE = Path(__file__).parents[2] / "src" / "tiderl"
DETERMINISTIC = ("schedule", "runtime", "sim")


@pytest.mark.parametrize("package", DETERMINISTIC)
def test_deterministic_packages_hold_nothing_banned(package: str) -> None:
    files = sorted((SOURCE / package).rglob("*.py"))
    assert files
    found = [line for file in files for line in violations(file.read_text(), str(file.relative_to(SOURCE)))]
    assert not found, "\n".join(found)


PLANTED = {
    "wall clock": "import time\nnow = time.monotonic()",
    "performance counter": "from time import perf_counter",
    "blocking sleep": "import time as clock\nclock.sleep(1)",
    "date": "from datetime import datetime\nstamp = datetime.now()",
    "module-level random": "import random\nx = random.random()",
    "numpy's global random": "import numpy as np\nx = np.random.rand()",
    "numpy generator without a stream": "import numpy as np\nx = np.random.default_rng()",
    "numpy random imported": "from numpy.random import default_rng",
    "uuid": "import uuid\nx = uuid.uuid4()",
    "secrets": "import secrets",
    "urandom": "import os\nx = os.urandom(8)",
    "urandom imported": "from os import urandom",
    "environment variables": "import os\nx = os.environ['X']",
    "address": "order = sorted(tasks, key=id)",
    "salted hash": "order = sorted(names, key=hash)",
    "thread": "import threading",
    "executor": "import concurrent.futures",
    "to_thread": "import asyncio\nasync def f():\n    await asyncio.to_thread(print)",
    "to_thread imported": "from asyncio import to_thread",
    "run_in_executor": "async def f(loop):\n    await loop.run_in_executor(None, print)",
    "call_soon_threadsafe": "def f(loop):\n    loop.call_soon_threadsafe(print)",
    "wait": "import asyncio\nasync def f(ts):\n    await asyncio.wait(ts)",
    "as_completed": "import asyncio\ndef f(ts):\n    return asyncio.as_completed(ts)",
    "file": "text = open('x').read()",
    "loop over a set literal": "for x in {1, 2}:\n    print(x)",
    "loop over set()": "for x in set(names):\n    print(x)",
    "loop over a set operation": "for x in set(a) - set(b):\n    print(x)",
    "loop over union": "def f(a, b):\n    for x in set(a).union(b):\n        print(x)",
    "loop over a local set": "def f(names):\n    seen = set(names)\n    for x in seen:\n        print(x)",
    "loop over an argument": "def f(seen: set[int]):\n    return [x for x in seen]",
    "loop over an attribute": (
        "class C:\n    def __init__(self):\n        self.seen = set()\n"
        "    def f(self):\n        for x in self.seen:\n            print(x)"
    ),
    "loop over a field": "class C:\n    seen: set[int]\n    def f(self):\n        return [x for x in self.seen]",
    "loop over all tasks": "import asyncio\nfor t in asyncio.all_tasks():\n    t.cancel()",
    "list of a set": "x = list({1, 2})",
    "sum of a set": "x = sum({0.1, 0.2})",
    "join of a set": "x = ','.join({'a', 'b'})",
    "dictionary from a set": "x = dict.fromkeys({1, 2})",
    "set unpacked": "def f(seen: frozenset[int]):\n    return [*seen]",
    "set unpacked into a call": "def f(g, seen: set[int]):\n    g(*seen)",
    "pop from a set": "def f():\n    seen = {1, 2}\n    return seen.pop()",
    "comprehension over a set": "x = [y for y in {1, 2}]",
    "dictionary comprehension over a set": "x = {y: 0 for y in {1, 2}}",
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name: str) -> None:
    assert violations(PLANTED[name])


HARMLESS = {
    "virtual time": "import asyncio\nasync def f():\n    await asyncio.sleep(1)\n    asyncio.get_running_loop().time()",
    "named stream": "from tiderl.data.rng import stream\nx = stream(0, 'a').random()",
    "generator as a type": "import numpy as np\ndef f(g: np.random.Generator) -> float:\n    return g.random()",
    "sorted set": "for x in sorted({1, 2}):\n    print(x)",
    "question to a set": "def f(seen: set[int]):\n    return 1 in seen, len(seen), max(seen), any(x > 1 for x in seen)",
    "set from a set": "def f(seen: set[int]):\n    return {x + 1 for x in seen}, {*seen, 3}",
    "loop over a dictionary": "def f(d: dict[int, int]):\n    return [k for k in d.keys()]",
    "pop from a list": "def f(xs: list[int]):\n    return xs.pop()",
    "a field called time": "def f(event):\n    return event.time, event.id",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_code_is_left_alone(name: str) -> None:
    assert violations(HARMLESS[name]) == []
