"""The virtual clock: order, jumps, deadlocks, spinning, and one log in every process (I10)."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiderl.data.errors import DeadlockError, InvariantViolation
from tiderl.sim.loop import SimTask, run_virtual


def test_clock_jumps_exactly_to_the_next_timer() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        moments = []
        for delay_s in (0.1, 0.2, 1e9, 1e-3):
            await asyncio.sleep(delay_s)
            moments.append(loop.time())
        return moments

    expected = [0.1]
    for delay_s in (0.2, 1e9, 1e-3):
        expected.append(expected[-1] + delay_s)
    assert run_virtual(main) == expected


def test_timers_of_one_instant_fire_in_the_order_they_were_set() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        fired: list[int] = []
        # A binary heap alone would mix these up.
        for number in range(50):
            loop.call_at(1.0, fired.append, number)
        for number in range(50, 60):
            loop.call_at(0.5, loop.call_at, 1.0, fired.append, number)
        await asyncio.sleep(2.0)
        return fired

    assert run_virtual(main) == list(range(60))


def test_a_timer_never_fires_before_its_moment() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for start_s in (0.0, 1.0, 1e7):
            early = max(loop.time(), start_s)
            fired: list[tuple[float, float]] = []
            moments = [early + step * 2.0**-28 for step in (1, 2, 3)]
            for moment in moments:
                loop.call_at(moment, lambda moment=moment, fired=fired: fired.append((moment, loop.time())))
            await asyncio.sleep(early + 1.0 - loop.time())
            assert fired == [(moment, moment) for moment in moments]

    run_virtual(main)


def test_timeouts_run_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600.0):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 3600.0


def test_deadlock_names_who_waits_for_whom() -> None:
    async def main() -> None:
        lock = asyncio.Lock()

        async def holder() -> None:
            async with lock:
                await asyncio.get_running_loop().create_future()

        async def contender() -> None:
            await asyncio.sleep(2.5)
            async with lock:
                raise AssertionError("never")

        async def boss(of: asyncio.Task[None]) -> None:
            await of

        async with asyncio.TaskGroup() as group:
            held = group.create_task(holder(), name="trainer")
            group.create_task(boss(held), name="driver")
            for _ in range(3):
                group.create_task(contender())

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main)
    text = str(caught.value)
    assert "at 2.5 s" in text
    assert "task 'trainer' waits in" in text and "holder" in text
    assert "task 'driver' waits in" in text and "for task 'trainer'" in text
    assert "3 tasks like" in text and "Lock.acquire" in text
    assert "\n" not in text


def test_waiting_for_an_endless_timer_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.sleep(float("inf"))

    with pytest.raises(DeadlockError):
        run_virtual(main)


def test_spinning_without_time_is_a_deadlock() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(DeadlockError, match="no time passes"):
        run_virtual(main, passes_per_instant=1000)


def test_progress_in_time_resets_the_step_budget() -> None:
    async def main() -> int:
        for _ in range(30):
            await asyncio.sleep(0)
            for _ in range(50):
                await asyncio.sleep(0)
            await asyncio.sleep(1e-9)
        return 1

    assert run_virtual(main, passes_per_instant=100) == 1


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(InvariantViolation, match="threads"):
        run_virtual(main)


def test_a_callback_that_raises_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: 1 // 0)
        await asyncio.sleep(10.0)

    with pytest.raises(ZeroDivisionError):
        run_virtual(main)


def test_cleanup_runs_after_success_and_after_a_deadlock() -> None:
    cleaned: list[str] = []

    async def waits(name: str) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cleaned.append(name)

    async def leaves() -> None:
        asyncio.get_running_loop().create_task(waits("left behind"))
        await asyncio.sleep(1.0)

    async def hangs() -> None:
        await waits("deadlocked")

    run_virtual(leaves)
    with pytest.raises(DeadlockError):
        run_virtual(hangs)
    assert cleaned == ["left behind", "deadlocked"]


def test_collector_threshold_is_given_back() -> None:
    before = gc.get_threshold()

    async def main() -> tuple[int, int, int]:
        return gc.get_threshold()

    assert run_virtual(main) != before
    assert gc.get_threshold() == before


def test_a_set_of_tasks_iterates_like_the_set_of_their_numbers() -> None:
    async def main() -> tuple[list[int], list[int]]:
        tasks = [asyncio.ensure_future(asyncio.sleep(1.0)) for _ in range(64)]
        numbers = [task.number for task in tasks if isinstance(task, SimTask)]
        order = [numbers[tasks.index(task)] for task in set(tasks)]
        await asyncio.gather(*tasks)
        return order, list(set(numbers))

    # By address, as asyncio's own tasks hash, the order would be another in every process.
    order, by_number = run_virtual(main)
    assert len(order) == 64 and order == by_number


# Timers of equal moments, cancellation through a TaskGroup's set, locks and queues, with 5,000 tasks alive at once.
MANY_TASKS = """
import asyncio, hashlib
from tiderl.sim.draws import Draws
from tiderl.sim.loop import run_virtual

async def main():
    loop, log, lock, queue = asyncio.get_running_loop(), hashlib.sha256(), asyncio.Semaphore(50), asyncio.Queue()
    draws = Draws(7, "test")
    alive = peak = 0

    def note(*what):
        log.update(repr((loop.time(), *what)).encode())

    async def one(number):
        nonlocal alive, peak
        alive += 1
        peak = max(peak, alive)
        try:
            for turn in range(3):
                await asyncio.sleep(round(draws.uniform(number, 0, turn), 1))
                async with lock:
                    await asyncio.sleep(0.001)
                note("turn", number, turn)
                await queue.put(number)
            if number == 4321:
                raise RuntimeError
            await asyncio.sleep(1000.0)
        except asyncio.CancelledError:
            note("cancelled", number)
            raise
        finally:
            alive -= 1

    async def drain():
        while True:
            note("drained", await queue.get())

    drainer = asyncio.ensure_future(drain())
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(5000):
                group.create_task(one(number))
    except* RuntimeError:
        note("failed")
    drainer.cancel()
    assert peak == 5000
    return log.hexdigest()

print(run_virtual(main))
"""


def test_five_thousand_tasks_give_one_log_in_two_processes() -> None:
    def log_of(hash_seed: str) -> str:
        source = Path(__file__).parents[2] / "src"
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(source)}
        done = subprocess.run(
            [sys.executable, "-c", MANY_TASKS], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    first = log_of("1")
    assert len(first) == 64
    assert first == log_of("2")


def test_an_interruption_ends_every_task_in_order_and_says_nothing(capsys) -> None:
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.sleep(100.0)
        finally:
            ended.append(f"{name} {asyncio.get_running_loop().time():g}")

    async def interrupted() -> None:
        await asyncio.sleep(1.0)
        raise KeyboardInterrupt

    async def main() -> None:
        try:
            async with asyncio.TaskGroup() as outer:
                outer.create_task(wait("outer"))
                async with asyncio.TaskGroup() as inner:
                    inner.create_task(wait("inner"))
                    inner.create_task(interrupted())
        finally:
            ended.append(f"main {asyncio.get_running_loop().time():g}")

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main)
    gc.collect()
    assert sorted(ended) == ["inner 1", "main 1", "outer 1"]
    assert capsys.readouterr().err == ""
