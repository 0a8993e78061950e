"""bench/ctb.py: its workload's sums against a pool without end, and its short form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

pytest.importorskip("torch")

from alternatives import write_model  # noqa: E402
from ctb import Arena  # noqa: E402
from ctb_workload import CpuLoop, Workload  # noqa: E402


def test_the_sums_of_a_workload_by_hand() -> None:
    """Two groups of 8 tasks with 6 turns each: contexts of 128, 176, … 368, then 16 more."""
    workload = Workload(2, 100, 0.01, turns=(6, 6))
    assert workload.tasks == [6] * 16
    assert workload.generated_tokens == 16 * 6 * 16
    assert workload.context_tokens == 16 * (128 + 176 + 224 + 272 + 320 + 368)
    assert workload.need_tokens == 16 * (368 + 15)
    assert workload.least_prefilled_tokens == 2 * (128 + 7) + 16 * 5 * 33
    assert workload.waits.tail_s == (0.15, 0.4)


@pytest.mark.live
@pytest.mark.parametrize("kv_policy", ["lru", "ctb"])
def test_a_pool_without_end_computes_nothing_twice(kv_policy: str, tmp_path: Path) -> None:
    model, weights = write_model("tiny", tmp_path)
    arena = Arena("torch", "cpu", model, weights)
    workload = Workload(1, model.vocab_size, 0.001)
    measured, blobs = arena.run(workload, kv_policy, 2.0)
    assert measured.recomputed_tokens == measured.evicted_tokens == measured.preemptions == 0
    best = 1 - workload.least_prefilled_tokens / workload.context_tokens
    assert measured.hit_fraction == pytest.approx(best)
    assert len(blobs.ids) == 8


def test_the_cpu_clock_jumps_over_waits_and_keeps_their_order() -> None:
    import asyncio
    import time

    async def main() -> tuple[float, list[str]]:
        order: list[str] = []

        async def after(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            order.append(name)

        start = asyncio.get_running_loop().time()
        await asyncio.gather(after(200.0, "late"), after(100.0, "early"))
        return asyncio.get_running_loop().time() - start, order

    began_s = time.monotonic()
    with asyncio.Runner(loop_factory=CpuLoop) as runner:
        seconds, order = runner.run(main())
    assert order == ["early", "late"] and 200.0 <= seconds < 210.0
    assert time.monotonic() - began_s < 60.0


@pytest.mark.live
def test_the_short_form_finds_equal_tokens() -> None:
    command = [sys.executable, str(BENCH / "ctb.py"), "--short", "--clock", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"figures": [], "ids_equal": True}
