"""The Environments port, as `async`, `pool` and `process`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support import environments_suite
from support.environments_suite import Make

from tiderl.data.records import Action
from tiderl.envs.mixed import MixedEnvironments
from tiderl.envs.pool import build_environments
from tiderl.runtime.ports import Environments

COUNTING = f"{environments_suite.__file__.replace('environments_suite', 'counting_env')}:Counting"


def maker(isolation: str, name: str = COUNTING) -> Make:
    def make(slots: int) -> Environments:
        return build_environments(isolation, name, {"scale": 0.5}, workers=2, slots=slots, deadline_s=20.0)

    return make


@pytest.mark.parametrize("check", environments_suite.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("isolation", ["async", "pool", "process"])
def test_port(isolation: str, check: Callable[..., None]) -> None:
    asyncio.run(check(maker(isolation)))


@pytest.mark.parametrize("check", environments_suite.CHECKS, ids=lambda check: check.__name__)
def test_port_of_a_mixture(check: Callable[..., None]) -> None:
    def make(slots: int) -> Environments:
        parts = {"one": maker("pool")(slots), "two": maker("async")(slots)}
        return MixedEnvironments(parts, slots=slots)

    asyncio.run(check(make))


def test_port_with_async_def() -> None:
    environments_suite.run_suite(maker("async", COUNTING.replace(":Counting", ":Patient")))


@pytest.mark.parametrize("isolation", ["async", "pool", "process"])
def test_what_the_environment_says_arrives_unchanged(isolation: str) -> None:
    async def scenario() -> None:
        environments = await environments_suite.started(maker(isolation))
        prompt = (await environments.prompts("train"))[1]
        assert (prompt.id, prompt.seed, dict(prompt.payload)) == ("train-1", 3, {"split": "train"})
        handle = await environments.open(environments_suite.key(1), prompt)
        assert (await handle.reset()).as_text() == "count 3"
        steps = [await handle.step(Action(word)) for word in ("go", "stop", "go")]
        assert [step.observation.as_text() for step in steps] == ["count 2", "count 1", "count 0"]
        assert [step.reward for step in steps] == [0.0, 0.0, 1.5]
        assert [step.terminated for step in steps] == [False, False, True]
        assert [step.info["said"] for step in steps] == ["go", "stop", "go"]
        assert await environments.expert(prompt) == ["go"] * 3
        await handle.close()
        await environments.close()

    asyncio.run(scenario())
