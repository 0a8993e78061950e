"""The policy that is trained: a small model from scratch, or one from a Hugging Face folder.

Weights are float32 whatever `dtype` says: that is the type of computation and of every exported version. Only models
whose logits are `output_embeddings(base_model(ids))` and nothing more are accepted. Knows nothing of updates.
"""

from __future__ import annotations

from typing import Any

import torch

from tiderl.data.errors import ConfigurationError
from tiderl.data.rng import stream_seed
from tiderl.data.scratch import SCRATCH_MODEL_TYPE, scratch_config
from tiderl.data.settings import ModelSettings
from tiderl.trainers.row_model import use_rows

SUPPORTED_MODELS = ("qwen2", "qwen3", "llama")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(settings: ModelSettings) -> torch.dtype:
    """Raises `ConfigurationError` for a dtype that cannot be trained in."""
    if settings.dtype not in DTYPES:
        raise ConfigurationError(
            f"cannot train in {settings.dtype!r}", where="train.dtype", hint=f"use one of: {', '.join(DTYPES)}"
        )
    return DTYPES[settings.dtype]


def build_model(settings: ModelSettings, seed: int) -> Any:
    """The start model in float32 on its device, without dropout. The same seed gives the same scratch weights."""
    model = _scratch_model(settings, seed) if settings.path == "scratch" else _stored_model(settings)
    use_rows(model)
    try:
        return model.to(settings.device).eval()
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"device {settings.device!r} is not usable: {error}", where="trainer") from error


def _scratch_model(settings: ModelSettings, seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(SCRATCH_MODEL_TYPE, **scratch_config(settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, "trainer", "model"))
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def _stored_model(settings: ModelSettings) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a rank host has no terminal of its own
    try:
        config = AutoConfig.from_pretrained(settings.path)
        if config.model_type not in SUPPORTED_MODELS:
            raise ConfigurationError(
                f"a model of type {config.model_type!r} is not yet supported",
                where=f"model.path {settings.path}",
                hint=f"use one of the types {', '.join(SUPPORTED_MODELS)}",
            )
        model, report = AutoModelForCausalLM.from_pretrained(
            settings.path, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigurationError(
            f"no model can be loaded: {str(error).splitlines()[0]}",
            where=f"model.path {settings.path}",
            hint="give 'scratch', a Hugging Face folder, or a hub id",
        ) from error
    if report["missing_keys"]:  # transformers would go on with random ones
        raise ConfigurationError(
            f"the weights lack {len(report['missing_keys'])} of the model's, e.g. {min(report['missing_keys'])}",
            where=f"model.path {settings.path}",
        )
    if model.config.vocab_size < settings.vocab_size:
        raise ConfigurationError(
            f"the tokenizer has {settings.vocab_size} ids, the model only {model.config.vocab_size}",
            where=f"model.path {settings.path}",
        )
    return model


def named_weights(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights on the CPU in `dtype`, under the names of `state_dict()`. A tied output head is left out: it is its
    input embedding, and whoever loads the weights ties it again."""
    tied = set(model.all_tied_weights_keys)
    return {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
