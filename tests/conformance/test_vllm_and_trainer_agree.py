"""What vLLM samples under an exported version, the trainer scores with the same log-probs, update after update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.engine_core_suite import run
from support.tiny_models import replace, turn
from support.trainer_cases import TINY_MODEL, WORDS, accumulate, micro_batch, random_group, sequence, settings
from support.vllm_models import KINDS, config

from tiderl.data.settings import EngineSettings, ModelSettings
from tiderl.trainers import torch_trainer

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.live]

from tiderl.engines.vllm_engine import VllmEngine, build  # noqa: E402 only where vLLM is installed

TEMPERATURE = 0.8
UPDATES = 3


@pytest.fixture
def engines() -> Iterator[list[VllmEngine]]:
    made: list[VllmEngine] = []
    yield made
    for engine in made:
        engine.close()


def folder_model(kind: str, directory: Path) -> ModelSettings:
    """A Hugging Face folder with random weights and the words of the trainer's cases."""
    import torch
    from transformers import AutoModelForCausalLM

    sizes = config(kind).to_dict() | {"vocab_size": len(WORDS)}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(type(config(kind))(**sizes)).save_pretrained(directory)
    return replace(TINY_MODEL, path=str(directory))


@pytest.mark.parametrize("kind", [*KINDS, "scratch"])
def test_the_logprob_gap_at_equal_version_is_rounding(tmp_path: Path, kind: str, engines: list[VllmEngine]) -> None:
    if kind == "scratch":
        model = msgspec.structs.replace(TINY_MODEL, hidden=64)
    else:
        model = folder_model(kind, tmp_path / "model")
    trainer = torch_trainer.build(
        settings(tmp_path / "versions", model=model, temperature=TEMPERATURE, lr=0.05, kl_coef=0.0)
    )
    trainer.warm_up((), 0, 0.0)
    engines.append(build(EngineSettings(model, kv_budget_tokens=128, kv_policy="ctb", max_batch=4)))
    batch = [micro_batch(random_group(0, 3), update=1)]
    for version in range(1, UPDATES + 1):
        accumulate(trainer, batch)
        metrics = trainer.finish().metrics
        if version > 1:  # this update scored what the engine sampled under the last one
            assert metrics["logprob_gap_tokens"] == 30
            assert metrics["logprob_gap_mean"] < 1e-5
        engines[0].load_weights(trainer.export(version))
        one = turn(version, [4, 5, 2], 30, temperature=TEMPERATURE)
        (result,) = run(engines[0], one)
        assert set(result.versions.tolist()) == {version}
        ids = np.concatenate([one.ids, result.ids]).tolist()
        scored = sequence(ids, range(3, 33), result.logprobs.tolist(), version=version)
        batch = [micro_batch([scored], update=version + 1)]
