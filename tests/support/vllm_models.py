"""Tiny models that vLLM's attention takes on a CPU (heads of 32), by version, and settings of an engine for them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from support.tiny_models import VOCAB_SIZE, WEIGHT_SCALE, folder, replace, write_weights

from tiderl.data.records import WeightHandle
from tiderl.data.settings import EngineSettings, ModelSettings

BLOCK_TOKENS = 32
MAX_CONTEXT_TOKENS = 48 * BLOCK_TOKENS
KINDS = ("tied", "untied")


def sizes(kind: str) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "tie_word_embeddings": kind == "tied",
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }


@functools.cache
def config(kind: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model("qwen3", **sizes(kind), architectures=["Qwen3ForCausalLM"])


@functools.cache
def model_folder(kind: str) -> str:
    path = folder() / f"vllm-{kind}"
    config(kind).save_pretrained(path)
    return str(path)


def engine_settings(kind: str = "tied", **changes: Any) -> EngineSettings:
    model = ModelSettings(model_folder(kind), VOCAB_SIZE, MAX_CONTEXT_TOKENS, pad_id=0, stop_ids=(1,))
    return replace(EngineSettings(model, kv_budget_tokens=400, kv_policy="ctb", max_batch=8), **changes)


@functools.cache
def oracle(kind: str, version: int) -> Any:
    """The Hugging Face model of `version`, eager, float32."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(2000 + version)
        model = AutoModelForCausalLM.from_config(config(kind), attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(WEIGHT_SCALE)
    return model


def state(kind: str, version: int) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in oracle(kind, version).named_parameters()}


@functools.cache
def weights(kind: str = "tied", version: int = 0) -> WeightHandle:
    return write_weights(state(kind, version), f"vllm-{kind}-v{version}", version)
