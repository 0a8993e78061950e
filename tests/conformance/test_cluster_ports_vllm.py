"""Clusters whose engines are vLLM keep what every cluster promises: inline, beside a trainer, and in processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.ports_suite import PROMISES, Promise, Subject, check, load_everywhere, name_of
from support.vllm_models import BLOCK_TOKENS

from tiderl.cluster.inline import InlineCluster
from tiderl.cluster.process import ProcessCluster
from tiderl.cluster.specs import HostSpec
from tiderl.data.settings import EngineSettings, ModelSettings, TrainerSettings
from tiderl.runtime.ports import Cluster

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.live]

CONTEXT_TOKENS = 64 * BLOCK_TOKENS
MODEL = ModelSettings(
    "scratch",
    64,
    CONTEXT_TOKENS,
    pad_id=0,
    stop_ids=(1,),
    layers=2,
    hidden=64,
    heads=2,
    kv_heads=1,
    words=tuple(f"w{i}" for i in range(64)),
)
CORE = "tiderl.engines.vllm_engine:build"
TRAINER = TrainerSettings(MODEL, seed=0, temperature=1.0)


def specs(kv_policy: str) -> list[HostSpec]:
    """Two ranks: one generates, the other generates and trains."""
    engine = EngineSettings(MODEL, kv_budget_tokens=2 * CONTEXT_TOKENS, kv_policy=kv_policy, max_batch=8)
    return [HostSpec(0, engine, CORE), HostSpec(1, engine, CORE, trainer=TRAINER)]


def subject(cluster: Cluster) -> Subject:
    return Subject(cluster, 60, CONTEXT_TOKENS, block_tokens=BLOCK_TOKENS)


@pytest.mark.parametrize("kv_policy", ["ctb", "lru"])
@pytest.mark.parametrize("promise", PROMISES, ids=name_of)
def test_inline_cluster_with_vllm_engines(promise: Promise, kv_policy: str) -> None:
    asyncio.run(check(lambda: subject(InlineCluster(specs(kv_policy))), promise))


@pytest.mark.parametrize("kv_policy", ["ctb", "lru"])
def test_process_cluster_with_vllm_engines(kv_policy: str) -> None:
    """All promises over one pair of processes, each with tasks of its own: starting vLLM takes seconds."""

    async def every_promise(prepared: Subject) -> None:
        for number, promise in enumerate(PROMISES):  # the last one closes the cluster
            await load_everywhere(prepared, await prepared.cluster.update.export(0))
            await promise(replace(prepared, prompt_id=number))

    asyncio.run(check(lambda: subject(ProcessCluster(specs(kv_policy), None)), every_promise))
