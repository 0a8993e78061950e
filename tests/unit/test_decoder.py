"""The decoder's forward against the Hugging Face model of the same weights, whatever the family's options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.tiny_models import model_settings

from tiderl.engines.attention import SlotAttention
from tiderl.engines.hf_model import SlotModel

TOLERANCE = 1e-5
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3 with biases": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True},
    "qwen3 with wide heads, untied": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": False},
    "qwen2 with yarn": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama with all biases and linear positions": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    },
    "llama with llama3 positions": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "one KV head, another activation": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "as many KV heads as heads": {"model_type": "qwen2", "num_key_value_heads": 4},
}


def models(folder: Path, options: dict[str, Any], dtype: str = "float32") -> tuple[SlotModel, Any]:
    """Ours and the oracle, with the same random weights; biases and norms included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**(SIZES | options))
    config.save_pretrained(folder)
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    file = folder / "model.safetensors"
    save_file({name: parameter.detach() for name, parameter in oracle.named_parameters()}, file)
    ours = SlotModel(model_settings(path=str(folder), max_context_tokens=200, dtype=dtype))
    ours.load(str(file))
    return ours, oracle


def logits(
    model: SlotModel,
    ids: torch.Tensor,
    lengths: list[int],
    parts: list[int],
    attention: Callable[..., SlotAttention] = SlotAttention,
) -> list[torch.Tensor]:
    """The last logits of rows `ids[r, :lengths[r]]`, after each of `parts`: so many of all rows' tokens at once."""
    cache = model.new_cache(len(lengths))
    cache.ensure(len(lengths), max(lengths))
    done, found = [0] * len(lengths), []
    for part in parts:
        ends = [min(start + part, length) for start, length in zip(done, lengths, strict=True)]
        assert all(end > start for start, end in zip(done, ends, strict=True))
        places = torch.stack(
            [(torch.arange(part) + start).clamp(max=end - 1) for start, end in zip(done, ends, strict=True)]
        )
        with torch.inference_mode():
            seen = attention(cache, 0, places, max(ends) - 1, fresh=not any(done))
            found.append(model.decoder.forward(seen, ids.gather(1, places), places))
        done = ends
    return found


def expected(oracle: Any, ids: torch.Tensor, length: int) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(ids[:length][None], use_cache=False).logits[0, -1].float()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_prefill_then_decode_gives_the_family_s_logits(tmp_path: Path, options: dict[str, Any]) -> None:
    ours, oracle = models(tmp_path, options)
    ids = torch.randint(0, 64, (3, 24), generator=torch.Generator().manual_seed(1))
    # A prefill from the start, one that continues, and two steps of one token.
    for number, part in enumerate(logits(ours, ids, [24, 24, 24], [14, 8, 1, 1])):
        for row in range(3):
            length = (14, 22, 23, 24)[number]
            gap = (part[row] - expected(oracle, ids[row], length)).abs().max()
            assert gap <= TOLERANCE, (number, row, gap)


def test_rows_of_uneven_length_do_not_disturb_each_other(tmp_path: Path) -> None:
    ours, oracle = models(tmp_path, OPTIONS["qwen3 with biases"])
    ids = torch.randint(0, 64, (3, 90), generator=torch.Generator().manual_seed(2))
    lengths = [90, 1, 37]
    (first,) = logits(ours, ids, lengths, [90])
    for row, length in enumerate(lengths):
        assert (first[row] - expected(oracle, ids[row], length)).abs().max() <= TOLERANCE


def test_a_short_row_goes_on_over_what_its_padding_left(tmp_path: Path) -> None:
    ours, oracle = models(tmp_path, OPTIONS["qwen3 with biases"])
    ids = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(3))
    cache = ours.new_cache(2)
    cache.ensure(2, 40)
    places = torch.stack([torch.arange(30), torch.arange(30).clamp(max=4)])
    ours.forward(cache, 0, ids.gather(1, places), places, 29)
    for at in range(5, 10):  # the second row alone: its padding lies where these tokens go
        place = torch.tensor([[at]])
        out = ours.forward(cache, 1, ids[1:, at : at + 1], place, at)
        assert (out[0] - expected(oracle, ids[1], at + 1)).abs().max() <= TOLERANCE


class AlwaysFresh(SlotAttention):
    """A mutant: takes every prefill for one that starts at position 0."""

    def __init__(self, cache: Any, first_row: int, positions: Any, last_position: int, fresh: bool) -> None:
        super().__init__(cache, first_row, positions, last_position, True)


class SeesTheFuture(SlotAttention):
    """A mutant: its masks hide nothing within the window."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._mask.zero_()


@pytest.mark.parametrize("mutant", [AlwaysFresh, SeesTheFuture])
def test_the_comparison_notices_a_broken_attention(tmp_path: Path, mutant: type[SlotAttention]) -> None:
    ours, oracle = models(tmp_path, OPTIONS["qwen3 with biases"])
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    last = logits(ours, ids, [20, 20], [12, 8], mutant)[-1]
    assert (last[0] - expected(oracle, ids[0], 20)).abs().max() > 100 * TOLERANCE
