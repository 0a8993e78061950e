"""`pause` and `resume` of an environment, as `async`, `pool`, `process` and mixed: told in order, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support import counting_env
from support.environments_suite import key

from tiderl.data.errors import EnvironmentRaised, EnvironmentTimeout, InvariantViolation
from tiderl.data.records import Action
from tiderl.envs.inprocess import AsyncEnvironments
from tiderl.envs.mixed import MixedEnvironments
from tiderl.envs.pool import PoolEnvironments, build_environments
from tiderl.runtime.ports import EnvironmentHandle, Environments

FILE = counting_env.__file__
DEADLINE_S = 20.0
SHORT_S = 0.2
KINDS = [("async", "Pausable"), ("async", "PausableAwaiting"), ("pool", "Pausable"), ("process", "Pausable")]
each_kind = pytest.mark.parametrize(("isolation", "name"), KINDS, ids=[f"{i} {n}" for i, n in KINDS])
each_method = pytest.mark.parametrize("method", ["pause", "resume"])


def build(isolation: str, name: str, **options: str) -> AsyncEnvironments | PoolEnvironments:
    return build_environments(isolation, f"{FILE}:{name}", options, workers=1, slots=1, deadline_s=DEADLINE_S)  # type: ignore[arg-type]


def run(environments: Environments, scenario: Callable[[Environments], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await environments.start()
        try:
            await scenario(environments)
        finally:
            await environments.close()

    asyncio.run(whole())


async def begun(environments: Environments, attempt: int = 0) -> EnvironmentHandle:
    handle = await environments.open(key(0, attempt=attempt), (await environments.prompts("train"))[0])
    await handle.reset()
    return handle


async def wait_for_room(handle: EnvironmentHandle) -> None:
    await handle.pause()
    await handle.resume()


async def play_with_pauses(environments: Environments) -> None:
    """A task of two steps, with a pause before each."""
    handle = await begun(environments)
    for _ in range(2):
        await wait_for_room(handle)
        await handle.step(Action("go"))
    await handle.close()


def told(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").split()


@each_kind
def test_what_declares_them_is_told_in_order(isolation: str, name: str, tmp_path: Path) -> None:
    run(build(isolation, name, log=str(tmp_path / "log")), play_with_pauses)
    assert told(tmp_path / "log") == ["reset", *["pause", "resume", "step"] * 2, "close"]


def test_a_mixture_tells_the_environment_whose_task_it_is(tmp_path: Path) -> None:
    parts = {"one": build("pool", "Pausable", log=str(tmp_path / "log")), "two": build("async", "Counting")}

    async def scenario(environments: Environments) -> None:
        for environment in ("two", "one"):
            prompts = await environments.prompts("train")
            prompt = next(prompt for prompt in prompts if prompt.environment == environment)
            handle = await environments.open(key(0), prompt)
            await handle.reset()
            await wait_for_room(handle)
            await handle.close()

    run(MixedEnvironments(parts, slots=1), scenario)
    assert told(tmp_path / "log") == ["reset", "pause", "resume", "close"]


def test_what_declares_one_of_them_is_told_that_one(tmp_path: Path) -> None:
    for isolation in ("async", "pool"):
        run(build(isolation, "PausableOnly", log=str(tmp_path / isolation)), play_with_pauses)
        assert told(tmp_path / isolation) == ["pause", "pause"]


class RecordingPool(PoolEnvironments):
    """Notes every request that goes to a worker."""

    async def call(self, worker: Any, method: str, *rest: Any) -> Any:
        self.__dict__.setdefault("asked", []).append(method)
        return await super().call(worker, method, *rest)


class RecordingAsync(AsyncEnvironments):
    """Notes every call of the user's code."""

    async def call(self, code: Any, where: str, *rest: Any, **named: Any) -> Any:
        self.__dict__.setdefault("asked", []).append(where.split()[-1])
        return await super().call(code, where, *rest, **named)


@pytest.mark.parametrize(("declares", "pauses"), [("Counting", 0), ("PausableOnly", 1), ("Pausable", 2)])
def test_only_what_is_declared_costs_a_round_trip(declares: str, pauses: int, tmp_path: Path) -> None:
    options = {"log": str(tmp_path / "log")} if pauses else {}
    for environments in (
        RecordingPool(f"{FILE}:{declares}", options, workers=1, slots=1, deadline_s=DEADLINE_S),
        RecordingAsync(f"{FILE}:{declares}", options, slots=1, deadline_s=DEADLINE_S),
    ):
        run(environments, play_with_pauses)
        asked = [method for method in environments.__dict__["asked"] if method in ("pause", "resume", "step")]
        assert asked == [*["pause", "resume"][:pauses], "step"] * 2


@each_method
@each_kind
def test_one_that_raises_is_the_environments_fault(isolation: str, name: str, method: str, tmp_path: Path) -> None:
    environments = build(isolation, name, log=str(tmp_path / "log"), **{method: "raise"})

    async def scenario(environments: Environments) -> None:
        handle = await begun(environments)
        with pytest.raises(EnvironmentRaised, match="ValueError: the shelf is empty") as caught:
            await wait_for_room(handle)
        assert caught.value.where.endswith(f"train/0.0#0 {method}")
        assert "about to fail" in caught.value.hint
        await handle.close()
        again = await begun(environments, attempt=1)  # its slot is free
        await again.close()

    run(environments, scenario)
    calls = ["pause"] if method == "pause" else ["pause", "resume"]
    assert told(tmp_path / "log") == ["reset", *calls, "close", "reset", "close"]


@each_method
@pytest.mark.parametrize(("isolation", "name"), KINDS[1:], ids=["async", "pool", "process"])
def test_one_that_hangs_is_a_timeout_of_its_own_task(isolation: str, name: str, method: str, tmp_path: Path) -> None:
    environments = build(isolation, name, log=str(tmp_path / "log"), **{method: "hang"})

    async def scenario(environments: Any) -> None:
        handle = await begun(environments)
        if method == "resume":
            await handle.pause()
        environments.deadline_s = SHORT_S
        with pytest.raises(EnvironmentTimeout) as caught:
            await getattr(handle, method)()
        assert caught.value.where.endswith(method)
        environments.deadline_s = DEADLINE_S
        await handle.close()
        again = await begun(environments, attempt=1)
        await again.step(Action("go"))
        await again.close()

    run(environments, scenario)
    calls = ["pause"] if method == "pause" else ["pause", "resume"]
    told_before_it_hung = 1 + len(calls)
    assert told(tmp_path / "log")[:told_before_it_hung] == ["reset", *calls]
    assert told(tmp_path / "log")[-3:] == ["reset", "step", "close"]


@each_kind
def test_a_task_that_ends_while_it_is_paused_is_closed_and_not_resumed(
    isolation: str, name: str, tmp_path: Path
) -> None:
    async def scenario(environments: Environments) -> None:
        handle = await begun(environments)
        await handle.pause()
        await handle.close()
        await handle.close()

    run(build(isolation, name, log=str(tmp_path / "log")), scenario)
    assert told(tmp_path / "log") == ["reset", "pause", "close"]


@each_method
@pytest.mark.parametrize("isolation", ["async", "pool"])
def test_neither_comes_before_reset(isolation: str, method: str, tmp_path: Path) -> None:
    async def scenario(environments: Environments) -> None:
        handle = await environments.open(key(0), (await environments.prompts("train"))[0])
        with pytest.raises(InvariantViolation, match=f"{method} before reset"):
            await getattr(handle, method)()
        await handle.close()

    run(build(isolation, "Pausable", log=str(tmp_path / "log")), scenario)
    assert not (tmp_path / "log").exists()
