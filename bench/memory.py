"""Memory over a long run of the built-in environment: resident bytes of driver, rank hosts and environment worker, and
whether they still grow after the first 200 updates.

    python bench/memory.py [--updates 2000] [--settled 200]

Prints one JSON object: for each process the median over the 100 updates after `settled` and over the last 100, in MB,
and the growth between them. Limit: 5 %. Also the size of the log files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.kills import TINY, KilledRun

GROWTH_LIMIT = 0.05
WINDOW = 100
LOOK_EVERY_S = 0.25


def watch(run: KilledRun) -> list[tuple[int, dict[str, int]]]:
    """(updates committed, resident bytes by process), a few times a second until the run ends."""
    looked: list[tuple[int, dict[str, int]]] = []
    found = {}
    while run.running():
        if len(found) < 4:
            found = run.processes()
        try:
            looked.append((run.updates, {who: process.memory_info().rss for who, process in found.items()}))
        except Exception:  # noqa: BLE001 one of them ended: look again who is there
            found = {}
        time.sleep(LOOK_EVERY_S)
    return looked


def growth(looked: list[tuple[int, dict[str, int]]], who: str, settled: int, last: int) -> dict[str, float]:
    early = [rss[who] for update, rss in looked if who in rss and settled <= update < settled + WINDOW]
    late = [rss[who] for update, rss in looked if who in rss and update > last - WINDOW]
    before, after = statistics.median(early) / 1e6, statistics.median(late) / 1e6
    return {"settled_mb": round(before, 1), "last_mb": round(after, 1), "growth": round(after / before - 1, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--settled", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = KilledRun(Path(folder), config=TINY.replace("updates: 12", f"updates: {arguments.updates}"))
        run.overrides = ("eval.every_updates=50",)
        run.start()
        try:
            looked = watch(run)
            assert run.driver is not None and run.driver.returncode == 0, run.tell()
            logs = {path.name: path.stat().st_size for path in (run.run / "logs").iterdir()}
            sizes = {path.name: path.stat().st_size for path in (run.run / "events").iterdir()}
        finally:
            run.end()
    found = {who: growth(looked, who, arguments.settled, arguments.updates) for who in looked[len(looked) // 2][1]}
    flat = all(figures["growth"] <= GROWTH_LIMIT for figures in found.values())
    print(json.dumps({"updates": arguments.updates, "flat": flat, **found, "log_bytes": logs, "event_bytes": sizes}))


if __name__ == "__main__":
    main()
