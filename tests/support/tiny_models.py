"""Tiny causal LMs with weight files by version, and the slow oracle: an unbatched Hugging Face forward, no cache.

Shared by the tests of engines. Three families; version v of a family is always the same random model.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tiderl.data.records import TaskKey, WeightHandle
from tiderl.data.scratch import SCRATCH_MODEL_TYPE, scratch_config
from tiderl.data.settings import EngineSettings, ModelSettings
from tiderl.data.turns import Sampling, Turn, TurnResult

FAMILIES = ("qwen3", "qwen2", "llama")
VOCAB_SIZE = 64
MAX_CONTEXT_TOKENS = 48
WEIGHT_SCALE = 2.0  # spreads the logits of an untrained model, so that temperature and stop ids matter


@functools.cache
def folder() -> Path:
    """One folder of this test process, deleted with it."""
    directory = tempfile.TemporaryDirectory(prefix="tiderl-tiny-")
    _KEPT.append(directory)
    return Path(directory.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def model_settings(family: str = "qwen3", **changes: Any) -> ModelSettings:
    path = "scratch" if family == "qwen3" else str(config_folder(family))
    settings = ModelSettings(
        path=path,
        vocab_size=VOCAB_SIZE,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        pad_id=0,
        stop_ids=(1,),
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=2,
    )
    return replace(settings, **changes)


def engine_settings(family: str = "qwen3", **changes: Any) -> EngineSettings:
    return replace(EngineSettings(model=model_settings(family), kv_budget_tokens=400), **changes)


def replace(struct: Any, **changes: Any) -> Any:
    return type(struct)(**{name: changes.get(name, getattr(struct, name)) for name in struct.__struct_fields__})


@functools.cache
def config(family: str) -> Any:
    from transformers import AutoConfig

    if family == "qwen3":
        return AutoConfig.for_model(SCRATCH_MODEL_TYPE, **scratch_config(model_settings()))
    return AutoConfig.for_model(
        family,
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=family == "qwen2",  # llama: a head of its own
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )


@functools.cache
def config_folder(family: str) -> Path:
    path = folder() / family
    config(family).save_pretrained(path)
    return path


@functools.cache
def oracle(family: str, version: int) -> Any:
    """The Hugging Face model of `version`, eager, float32."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(1000 + version)
        model = AutoModelForCausalLM.from_config(config(family), attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(WEIGHT_SCALE) if parameter.dim() > 1 else parameter.add_(
                    torch.randn_like(parameter) * 0.1
                )
    return model


def state(family: str, version: int) -> dict[str, torch.Tensor]:
    """Parameters by Hugging Face name; a tied head is left out."""
    return {name: parameter.detach().clone() for name, parameter in oracle(family, version).named_parameters()}


def write_weights(tensors: dict[str, torch.Tensor], name: str, version: int) -> WeightHandle:
    path = folder() / f"{name}.safetensors"
    save_file(tensors, path)
    return WeightHandle(version, str(path), path.stat().st_size)


@functools.cache
def weights(family: str = "qwen3", version: int = 0) -> WeightHandle:
    return write_weights(state(family, version), f"{family}-v{version}", version)


def oracle_logprobs(family: str, version: int, ids: Sequence[int], temperature: float) -> np.ndarray:
    """float64 [len(ids), vocabulary]: row t is the distribution of what follows ids[: t + 1]."""
    with torch.inference_mode():
        logits = oracle(family, version)(torch.tensor([list(ids)])).logits[0].double()
    return torch.log_softmax(logits / temperature, dim=-1).numpy()


def check_against_oracle(family: str, turn: Turn, result: TurnResult, tolerance: float = 1e-5) -> None:
    """Every token's log-prob, and that it is the token which its uniform draws, under the weights it names."""
    sampling = turn.sampling
    ids = np.concatenate([turn.ids, result.ids]).astype(int)
    uniforms = np.random.Generator(np.random.Philox(key=sampling.seed)).random(len(result.ids) + 1)
    for version in np.unique(result.versions):
        table = oracle_logprobs(family, int(version), ids, sampling.temperature or 1.0)
        for n in np.flatnonzero(result.versions == version):
            row, token = table[len(turn.ids) + n - 1], result.ids[n]
            if sampling.temperature == 0.0:
                assert row[token] >= row.max() - tolerance and result.logprobs[n] == 0.0
                continue
            assert abs(row[token] - result.logprobs[n]) <= tolerance, (row[token], result.logprobs[n])
            cumulative = np.cumsum(np.exp(row))
            below = cumulative[token - 1] if token else 0.0
            assert below - tolerance <= uniforms[n] <= cumulative[token] + tolerance


def task(number: int) -> TaskKey:
    return TaskKey("train", number, 0)


def turn(number: int, ids: Sequence[int], max_new_tokens: int = 4, *, at: int = 0, **changes: Any) -> Turn:
    """A turn of task `number`; `changes` go to its sampling or to itself."""
    sampling = {"temperature": 1.0, "stop_ids": (), "seed": 7919 * number + at}
    sampling |= {name: changes.pop(name) for name in tuple(changes) if name in Sampling.__struct_fields__}
    return Turn(
        task=task(number),
        turn=at,
        ids=np.array(ids, dtype=np.int32),
        sampling=Sampling(max_new_tokens=max_new_tokens, **sampling),
        remaining_tokens=MAX_CONTEXT_TOKENS,
        **changes,
    )
