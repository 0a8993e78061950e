"""The clusters of rank hosts keep what every cluster promises: inline and in processes, with fake and torch cores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from support import fake_cores
from support.ports_suite import PROMISES, Promise, Subject, check, load_everywhere, name_of

from tiderl.cluster.inline import InlineCluster
from tiderl.cluster.process import ProcessCluster
from tiderl.cluster.specs import HostSpec
from tiderl.data.settings import EngineSettings, ModelSettings, TrainerSettings

MODEL = ModelSettings(
    "scratch",
    64,
    128,
    pad_id=0,
    stop_ids=(1,),
    layers=2,
    hidden=32,
    heads=2,
    kv_heads=1,
    words=tuple(f"w{i}" for i in range(64)),
)
ENGINE = EngineSettings(MODEL, kv_budget_tokens=1024, host_kv_budget_tokens=512)
TRAINER = TrainerSettings(MODEL, seed=0, temperature=1.0)


def torch_specs() -> list[HostSpec]:
    """Two ranks: one generates, the other generates and trains."""
    return [HostSpec(0, engine=ENGINE), HostSpec(1, engine=ENGINE, trainer=TRAINER)]


def fake_specs() -> list[HostSpec]:
    engine_core, trainer_core = f"{fake_cores.HERE}:build_engine", f"{fake_cores.HERE}:build_trainer"
    return [
        HostSpec(0, fake_cores.ENGINE, engine_core),
        HostSpec(1, fake_cores.ENGINE, engine_core, fake_cores.TRAINER, trainer_core),
    ]


def inline(specs: list[HostSpec]) -> Callable[[], Subject]:
    return lambda: Subject(InlineCluster(specs), 60, 128)


def process(specs: list[HostSpec]) -> Callable[[], Subject]:
    return lambda: Subject(ProcessCluster(specs, None), 60, 128)


@pytest.mark.parametrize("promise", PROMISES, ids=name_of)
def test_inline_cluster_with_fake_cores(promise: Promise) -> None:
    asyncio.run(check(inline(fake_specs()), promise))


@pytest.mark.parametrize("promise", PROMISES, ids=name_of)
def test_inline_cluster_with_torch_cores(promise: Promise) -> None:
    pytest.importorskip("torch")
    asyncio.run(check(inline(torch_specs()), promise))


@pytest.mark.live
@pytest.mark.parametrize("promise", PROMISES, ids=name_of)
def test_process_cluster_with_fake_cores(promise: Promise) -> None:
    asyncio.run(check(process(fake_specs()), promise))


@pytest.mark.live
def test_process_cluster_with_torch_cores() -> None:
    """All promises over one pair of processes, each with tasks of its own: starting torch takes seconds."""
    pytest.importorskip("torch")

    async def every_promise(subject: Subject) -> None:
        for number, promise in enumerate(PROMISES):  # the last one closes the cluster
            await load_everywhere(subject, await subject.cluster.update.export(0))
            await promise(replace(subject, prompt_id=number))

    asyncio.run(check(process(torch_specs()), every_promise))
