"""Environments that raise, hang, lie, flood, print or die: each gets its typed outcome, the others go on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from support import counting_env

from tiderl.data.errors import (
    ConfigurationError,
    EnvironmentNonsense,
    EnvironmentRaised,
    EnvironmentTimeout,
    InfrastructureFault,
    TideError,
    VerifierFault,
)
from tiderl.data.records import Action, Prompt, Step, TaskKey, Trajectory
from tiderl.data.settings import WaitProfile
from tiderl.envs.inprocess import AsyncEnvironments
from tiderl.envs.pool import PoolEnvironments
from tiderl.runtime.ports import EnvironmentHandle, Environments

pytestmark = pytest.mark.live

NAUGHTY = f"{counting_env.__file__}:Naughty"
GONE_WITHIN_S = 2.0


def pool(
    *,
    workers: int = 1,
    deadline_s: float = 20.0,
    answer_s: float = 5.0,
    one_each: bool = False,
    log_dir: Path | None = None,
) -> PoolEnvironments:
    return PoolEnvironments(
        NAUGHTY,
        {},
        workers=workers,
        slots=4,
        deadline_s=deadline_s,
        answer_s=answer_s,
        one_each=one_each,
        log_dir=str(log_dir) if log_dir else None,
    )


def in_process() -> AsyncEnvironments:
    return AsyncEnvironments(NAUGHTY, {}, slots=4, deadline_s=20.0)


async def begin(environments: Environments, number: int, do: str = "count") -> EnvironmentHandle:
    handle = await environments.open(TaskKey("train", number, 0), Prompt("p", 5, {"do": do}))
    try:
        await handle.reset()
    except TideError:
        await handle.close()
        raise
    return handle


def run(environments: Environments, scenario: Callable[[], Awaitable[None]]) -> None:
    """The scenario between start and close, with a limit that only a broken isolation reaches."""

    async def whole() -> None:
        async with asyncio.timeout(60):
            await environments.start()
            try:
                await scenario()
            finally:
                await environments.close()

    asyncio.run(whole())


NONSENSE = (
    "none", "nan", "infinite", "text-reward", "number", "tuple", "endless", "no-observation", "maybe-over",
)  # fmt: skip


@pytest.mark.parametrize("make", [in_process, pool], ids=["async", "pool"])
def test_nonsense_and_exceptions_are_typed_and_cost_only_their_own_task(
    make: Callable[[], Environments], capfd: pytest.CaptureFixture[str]
) -> None:
    environments = make()

    async def scenario() -> None:
        neighbour = await begin(environments, 0)
        for number, what in enumerate(NONSENSE, start=1):
            handle = await begin(environments, number)
            with pytest.raises(EnvironmentNonsense) as nonsense:
                await handle.step(Action(what))
            assert f"train/{number}.0#0 step" in nonsense.value.where
            await handle.close()
        for what, kind in (("raise", "ValueError: the shelf is empty"), ("exit", "SystemExit: 3")):
            handle = await begin(environments, 50)
            with pytest.raises(EnvironmentRaised) as caught:
                await handle.step(Action(what))
            assert kind in caught.value.what
            assert "counting_env.py:" in caught.value.what
            if what == "raise":
                assert "about to fail" in caught.value.hint
            await handle.close()
        with pytest.raises(EnvironmentNonsense):
            await begin(environments, 60, do="none")
        with pytest.raises(EnvironmentRaised):
            await begin(environments, 61, do="raise")
        for _ in range(3):
            assert isinstance(await neighbour.step(Action("go")), Step)
        await neighbour.close()

    run(environments, scenario)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("make", [in_process, pool], ids=["async", "pool"])
def test_odd_info_and_long_observations_of_parts_arrive_as_plain_values(make: Callable[[], Environments]) -> None:
    environments = make()

    async def scenario() -> None:
        handle = await begin(environments, 0)
        answer = await handle.step(Action("odd-info"))
        assert answer.info["n"] == [1, 2]
        assert answer.info["thing"].startswith("<object")
        assert (await environments.open(TaskKey("train", 1, 0), Prompt("p", 1, {"do": "observation"}))) is not None
        await handle.close()

    run(environments, scenario)


@pytest.mark.parametrize("make", [in_process, pool], ids=["async", "pool"])
def test_a_bad_score_is_the_verifiers_fault(make: Callable[[], Environments]) -> None:
    environments = make()

    def trajectory(what: str) -> Trajectory:
        no, none = np.zeros(1, np.int32), np.zeros(1, np.float32)
        return Trajectory(0, TaskKey("train", 0, 0), no, no == 0, none, no, (), 1.0, True, "terminated", (what,))

    async def scenario() -> None:
        handle = await begin(environments, 0)
        for what in ("raise", "none", "text"):
            with pytest.raises(VerifierFault):
                await handle.score(trajectory(what))
        await handle.close()

    run(environments, scenario)


def test_prints_reach_neither_terminal_nor_protocol(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    environments = pool(log_dir=tmp_path)

    async def scenario() -> None:
        handle = await begin(environments, 0, do="print")
        assert (await handle.step(Action("print"))).observation.as_text() == "count 999"
        await handle.step(Action("flood"))
        assert (await handle.step(Action("go"))).observation.as_text() == "count 997"
        await handle.close()

    run(environments, scenario)
    assert capfd.readouterr() == ("", "")
    log = tmp_path / "env-0.log"
    assert "hello from within" in log.read_text()
    assert "hello from below" in log.read_text()
    assert log.stat().st_size < 1_100_000


@pytest.mark.parametrize("what", ["hang", "spin"])
def test_a_hung_call_times_out_and_its_worker_is_replaced_when_the_others_are_done(what: str) -> None:
    environments = pool(deadline_s=1.0)

    async def scenario() -> None:
        neighbour, hung = await begin(environments, 0), await begin(environments, 1)
        first = (await environments.place()).pid
        with pytest.raises(EnvironmentTimeout):
            await hung.step(Action(what))
        await hung.close()
        assert (await neighbour.step(Action("go"))).observation.as_text() == "count 999"
        newcomer = await begin(environments, 2)  # goes to a new worker: the old one takes nobody in
        assert (await environments.place()).pid != first
        assert (await newcomer.step(Action("go"))).observation.as_text() == "count 999"
        assert (await neighbour.step(Action("go"))).observation.as_text() == "count 998"
        await neighbour.close()
        await newcomer.close()

    run(environments, scenario)


def test_a_worker_that_answers_nothing_is_killed_and_replaced() -> None:
    environments = pool(deadline_s=1.0, answer_s=1.0)

    async def scenario() -> None:
        neighbour, holder = await begin(environments, 0), await begin(environments, 1)
        with pytest.raises(EnvironmentTimeout):
            await holder.step(Action("hold"))
        with pytest.raises(InfrastructureFault):
            await neighbour.step(Action("go"))
        await holder.close()
        await neighbour.close()
        again = await begin(environments, 2)
        assert (await again.step(Action("go"))).observation.as_text() == "count 999"
        await again.close()

    run(environments, scenario)


@pytest.mark.parametrize(("what", "how"), [("kill", "SIGKILL"), ("leave", "exit status 7"), ("segfault", "SIGSEGV")])
def test_a_call_that_kills_its_worker_is_the_environments_fault_and_costs_only_that_worker(what: str, how: str) -> None:
    environments = pool(workers=2)

    async def scenario() -> None:
        handles = [await begin(environments, number) for number in range(4)]
        with pytest.raises(EnvironmentRaised, match=how):
            await handles[0].step(Action(what))
        outcomes = await asyncio.gather(*(handle.step(Action("go")) for handle in handles[1:]), return_exceptions=True)
        kinds = sorted(type(outcome).__name__ for outcome in outcomes)
        assert kinds == ["InfrastructureFault", "Step", "Step"]  # one neighbour in the worker, two in the other
        for handle in handles:
            await handle.close()
        again = await begin(environments, 5)
        assert isinstance(await again.step(Action("go")), Step)
        await again.close()

    run(environments, scenario)


@pytest.mark.parametrize("what", ["hang", "hold", "kill"])
def test_one_process_each_costs_nobody_else(what: str) -> None:
    environments = pool(one_each=True, deadline_s=1.5)

    async def scenario() -> None:
        neighbour, bad = await begin(environments, 0), await begin(environments, 1)
        with pytest.raises(EnvironmentRaised if what == "kill" else EnvironmentTimeout):
            await bad.step(Action(what))
        await bad.close()
        assert isinstance(await neighbour.step(Action("go")), Step)
        await neighbour.close()
        again = await begin(environments, 2)
        assert isinstance(await again.step(Action("go")), Step)
        await again.close()

    run(environments, scenario)


def test_faults_give_their_slots_back() -> None:
    environments = pool(workers=2, deadline_s=1.0)

    async def task(number: int) -> str:
        try:
            handle = await begin(environments, number, do="none" if number % 4 == 0 else "count")
        except TideError as error:
            return type(error).__name__
        try:
            await handle.step(Action(("raise", "nan", "short-hang")[number % 3]))
        except TideError as error:
            return type(error).__name__
        finally:
            await handle.close()
        return "Step"

    async def scenario() -> None:
        outcomes = await asyncio.gather(*(task(number) for number in range(24)))
        assert set(outcomes) == {"EnvironmentNonsense", "EnvironmentRaised", "Step"}
        handles = [await begin(environments, number) for number in range(100, 104)]  # all four slots are free
        for handle in handles:
            await handle.close()

    run(environments, scenario)


def test_a_wait_longer_than_the_deadline_is_a_timeout() -> None:
    environments = PoolEnvironments(
        NAUGHTY, {}, workers=1, slots=1, deadline_s=0.2, wait=WaitProfile(median_s=5.0, sigma=0.0)
    )

    async def scenario() -> None:
        handle = await begin(environments, 0)
        with pytest.raises(EnvironmentTimeout):
            await handle.step(Action("go"))
        await handle.close()

    run(environments, scenario)


def test_waits_overlap() -> None:
    """Four tasks that each wait 0.3 s: the sum is not waited. (Started together, so the last ends after one wait.)"""
    environments = PoolEnvironments(
        NAUGHTY, {}, workers=1, slots=4, deadline_s=20.0, wait=WaitProfile(median_s=0.3, sigma=0.0)
    )

    async def scenario() -> None:
        handles = [await begin(environments, number) for number in range(4)]
        order: list[str] = []

        async def step(handle: EnvironmentHandle) -> None:
            order.append("begins")
            await handle.step(Action("go"))
            order.append("ends")

        await asyncio.gather(*(step(handle) for handle in handles))
        assert order == ["begins"] * 4 + ["ends"] * 4
        for handle in handles:
            await handle.close()

    run(environments, scenario)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "no environment is called"),
        ("json:JSONDecoder", "is not an environment"),
        ("babyia", "no environment"),
    ],
)
def test_what_is_no_environment_is_refused_at_the_start(name: str, says: str) -> None:
    environments = PoolEnvironments(name, {}, workers=1, slots=1, deadline_s=5.0)
    with pytest.raises(ConfigurationError, match=says):
        asyncio.run(environments.start())
    asyncio.run(environments.close())


def test_async_def_in_a_pool_and_options_that_it_does_not_take_are_refused_at_the_start() -> None:
    for name, options, says in (("Patient", {}, "async def"), ("Counting", {"scael": 2}, "has no option 'scael'")):
        environments = PoolEnvironments(NAUGHTY.replace("Naughty", name), options, workers=1, slots=1, deadline_s=5.0)
        with pytest.raises(ConfigurationError, match=says):
            asyncio.run(environments.start())
        asyncio.run(environments.close())


DRIVER = """
import asyncio, sys
from tiderl.data.records import Action, Prompt, TaskKey
from tiderl.envs.pool import PoolEnvironments

async def main():
    environments = PoolEnvironments(sys.argv[1], {}, workers=2, slots=2, deadline_s=60)
    await environments.start()
    handle = await environments.open(TaskKey("train", 0, 0), Prompt("p", 5))
    await handle.reset()
    print(*(worker.pid for worker in environments._workers), flush=True)
    await handle.step(Action("spin"))

asyncio.run(main())
"""


def test_workers_die_with_their_driver_even_in_the_middle_of_a_call() -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, NAUGHTY],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.2)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    driver.stdout.close()
    until = time.monotonic() + 5 * GONE_WITHIN_S  # the promise is 2 s; the machine may be busy
    while any(map(exists, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(exists, pids))


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
