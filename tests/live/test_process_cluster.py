"""Rank hosts that fail: what waits is told at once, the rank comes back empty, nothing outlives its driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from support import fake_cores
from support.ports_suite import Subject, assert_whole, turn_of, words

from tiderl.cluster.inline import InlineCluster
from tiderl.cluster.process import ProcessCluster
from tiderl.cluster.specs import HostSpec
from tiderl.data.errors import ConfigurationError, InfrastructureFault, NumericalFault, RankLost, TideError
from tiderl.data.records import WeightHandle
from tiderl.data.turns import Turn
from tiderl.runtime.ports import Cluster, RankChange

pytestmark = pytest.mark.live

ENGINE_CORE, TRAINER_CORE = f"{fake_cores.HERE}:build_engine", f"{fake_cores.HERE}:build_trainer"
SPECS = [
    HostSpec(0, fake_cores.ENGINE, ENGINE_CORE),
    HostSpec(1, None, ENGINE_CORE, fake_cores.TRAINER, TRAINER_CORE),
]
DEADLINE_S = 30.0  # generous: a busy machine is no failure


def special(subject: Subject, first_token: int, member: int = 0, new: int = 4) -> Turn:
    return turn_of(subject, np.append(np.int32(first_token), words(subject, 5)).astype(np.int32), member, new=new)


def subject_of(cluster: InlineCluster | ProcessCluster) -> Subject:
    return Subject(cluster, fake_cores.VOCAB_SIZE, fake_cores.MAX_CONTEXT_TOKENS)


MAKERS: dict[str, Callable[[Callable[[str], None] | None], InlineCluster | ProcessCluster]] = {
    "inline": lambda report: InlineCluster(SPECS, report=report),
    "process": lambda report: ProcessCluster(SPECS, None, report=report, restarts=0),
}
either = pytest.mark.parametrize("kind", MAKERS)


@contextlib.asynccontextmanager
async def started(cluster: InlineCluster | ProcessCluster):  # type: ignore[no-untyped-def]
    await cluster.start()
    subject = subject_of(cluster)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await subject.engine.load_weights(WeightHandle(0, "nowhere", 0))
            yield subject
    finally:
        await cluster.close()


async def changes_until_the_end(cluster: Cluster) -> None:
    """Take in changes until there are no more of them, which is an error."""
    while True:
        await cluster.next_change()


@either
def test_failed_turn_raises_its_own_class_and_others_go_on(kind: str) -> None:
    async def check() -> None:
        async with started(MAKERS[kind](None)) as subject:
            good = asyncio.ensure_future(subject.engine.generate(turn_of(subject, words(subject, 5), member=1)))
            with pytest.raises(NumericalFault, match=r"turn 0 of train/0\.0#0 on rank 0: logits are not finite"):
                await subject.engine.generate(special(subject, fake_cores.FAILS))
            assert (await good).finish_reason == "length"

    asyncio.run(check())


@either
def test_unexpected_exception_of_a_core_arrives_with_its_type_and_the_rank_lives_on(kind: str) -> None:
    async def check() -> None:
        async with started(MAKERS[kind](None)) as subject:
            with pytest.raises(InfrastructureFault, match=r"ZeroDivisionError: an update below 0 at .*fake_cores"):
                await subject.cluster.update.begin(-1, [1])
            await subject.cluster.update.begin(1, [1])

    asyncio.run(check())


@either
def test_turns_that_cannot_run_are_reported_with_the_holders(kind: str) -> None:
    async def check() -> None:
        reports: asyncio.Queue[str] = asyncio.Queue()
        async with started(MAKERS[kind](reports.put_nowait)) as subject:
            await subject.engine.generate(turn_of(subject, words(subject, 5), member=3))
            stuck = asyncio.ensure_future(subject.engine.generate(special(subject, fake_cores.STUCK)))
            line = await reports.get()
            assert line == "rank 0: 1 turns wait and none can run: 9 of 1024 tokens are held by train/0.3#0"
            stuck.cancel()

    asyncio.run(check())


@either
def test_broken_step_fails_what_waits_and_then_the_run(kind: str) -> None:
    """Inline nothing can be started afresh; here the processes may not be either (`restarts=0`)."""

    async def check() -> None:
        async with started(MAKERS[kind](None)) as subject:
            with pytest.raises(InfrastructureFault, match="RuntimeError: the core broke"):
                await subject.engine.generate(special(subject, fake_cores.BREAKS))
            with pytest.raises(InfrastructureFault, match="RuntimeError: the core broke"):
                await changes_until_the_end(subject.cluster)
            with pytest.raises(RankLost):
                await subject.engine.generate(special(subject, 5))

    asyncio.run(check())


def test_host_killed_in_mid_generate_is_reported_and_comes_back_usable() -> None:
    async def check() -> None:
        cluster = ProcessCluster(SPECS, None)
        async with started(cluster) as subject:
            engine = subject.engine
            running = asyncio.ensure_future(engine.generate(special(subject, fake_cores.SLOW, new=100)))
            await asyncio.sleep(0.1)
            pid = cluster.pids[0]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(RankLost):
                await running
            change = await cluster.next_change()
            assert (change.rank, change.lost) == (0, True)
            assert "SIGKILL" in change.reason
            assert await cluster.next_change() == RankChange(0, lost=False)
            assert engine is cluster.engines[0]
            assert engine.stats.version == -1  # it came back empty
            await engine.load_weights(WeightHandle(4, "nowhere", 0))
            turn = turn_of(subject, words(subject, 5))
            result = await engine.generate(turn)
            assert_whole(turn, result)
            assert set(result.versions.tolist()) == {4}

    asyncio.run(check())


def test_rank_that_keeps_dying_ends_the_run_and_quotes_its_log(tmp_path: Path) -> None:
    async def check() -> None:
        async with started(ProcessCluster(SPECS, tmp_path, restarts=1)) as subject:
            cluster, breaking = subject.cluster, special(subject, fake_cores.BREAKS)
            with pytest.raises(RankLost):
                await subject.engine.generate(breaking)
            assert [(await cluster.next_change()).lost for _ in range(2)] == [True, False]
            with pytest.raises(RankLost):
                await subject.engine.generate(breaking)
            with pytest.raises(InfrastructureFault, match=r"died 2 times.*\n.*RuntimeError: the core broke"):
                await changes_until_the_end(cluster)
        assert "RuntimeError: the core broke" in (tmp_path / "rank-0.log").read_text()

    asyncio.run(check())


def test_working_engine_reports_its_stats_while_a_turn_runs() -> None:
    async def check() -> None:
        async with started(ProcessCluster(SPECS, None)) as subject:
            running = asyncio.ensure_future(subject.engine.generate(special(subject, fake_cores.SLOW, new=100)))
            while subject.engine.stats.generated_tokens < 2:
                assert not running.done()
                await asyncio.sleep(0.02)
            running.cancel()

    asyncio.run(check())


WRONG: dict[str, tuple[HostSpec, type[TideError], str]] = {
    "no such module": (HostSpec(0, fake_cores.ENGINE, "tiderl.engines.none:build"), ConfigurationError, "no core"),
    "no such function": (HostSpec(0, fake_cores.ENGINE, f"{fake_cores.HERE}:nothing"), ConfigurationError, "no core"),
}


@pytest.mark.parametrize("wrong", WRONG)
@either
def test_core_that_cannot_be_built_is_the_error_of_start(kind: str, wrong: str) -> None:
    spec, error, text = WRONG[wrong]
    specs = [spec, SPECS[1]]

    async def check() -> None:
        cluster = ProcessCluster(specs, None) if kind == "process" else InlineCluster(specs)
        with pytest.raises(error, match=text):
            await cluster.start()
        await cluster.close()

    asyncio.run(check())


def test_ranks_that_make_up_no_run_are_refused() -> None:
    for specs in ([SPECS[0]], [SPECS[1]], [SPECS[0], HostSpec(2, trainer=fake_cores.TRAINER)]):
        with pytest.raises(ConfigurationError):
            ProcessCluster(specs, None)


def test_killed_driver_leaves_no_orphan(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import asyncio\n"
        "import numpy as np\n"
        f"from {fake_cores.HERE} import ENGINE, HERE, SLOW, TRAINER\n"
        "from tiderl.cluster.process import ProcessCluster\n"
        "from tiderl.cluster.specs import HostSpec\n"
        "from tiderl.data.records import TaskKey\n"
        "from tiderl.data.turns import Sampling, Turn\n"
        "async def main():\n"
        "    specs = [HostSpec(0, ENGINE, HERE + ':build_engine'),\n"
        "             HostSpec(1, None, '', TRAINER, HERE + ':build_trainer')]\n"
        "    cluster = ProcessCluster(specs, None)\n"
        "    await cluster.start()\n"
        "    print(*cluster.pids.values(), flush=True)\n"
        "    sampling = Sampling(1.0, 100, ())\n"
        "    turn = Turn(TaskKey('train', 0, 0), 0, np.array([SLOW], np.int32), sampling, 1000)\n"
        "    await cluster.engines[0].generate(turn)\n"
        "asyncio.run(main())\n"
    )
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    driver = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    driver.kill()
    driver.communicate()
    until_s = time.monotonic() + DEADLINE_S
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until_s, f"orphans: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
