"""The cost model of this CPU against the measurements it was fitted to, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiderl.cost import CostModel, ModelShape, cost_model
from tiderl.data.errors import ConfigurationError
from tiderl.data.settings import ModelSettings


def model(**sizes: object) -> ModelSettings:
    settings = {
        "path": "scratch",
        "vocab_size": 1024,
        "max_context_tokens": 512,
        "pad_id": 0,
        "stop_ids": (1,),
        **sizes,
    }
    return ModelSettings(**settings)  # type: ignore[arg-type]


TINY = model()
SMALL = model(vocab_size=4096, layers=6, hidden=256, heads=4, kv_heads=2)


def decode_tokens_per_s(cost: CostModel, batch: int, context: int) -> float:
    return batch / (cost.iteration_s + cost.sequence_s * batch + cost.context_token_s * batch * context)


def test_parameters_count_every_matrix() -> None:
    # 1,024 x 128 embeddings; per layer q and o 128 x 128, k and v 128 x 64, three feed-forward matrices 128 x 384.
    assert ModelShape.of(TINY).parameters == 1024 * 128 + 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384)
    assert ModelShape.of(TINY).kv_bytes_per_token == 2 * 4 * 2 * 32 * 4


def test_decode_rates_are_those_measured() -> None:
    tiny, small = cost_model("this-cpu", TINY), cost_model("this-cpu", SMALL)
    # Measured: prompt 32 and 128 new tokens, so a mean context of 96; then contexts of about 576 and 1,088.
    for batch, context, rate in (
        (1, 96, 925),
        (8, 96, 4338),
        (32, 96, 8590),
        (64, 96, 10240),
        (32, 576, 4886),
        (8, 1088, 2349),
    ):
        assert decode_tokens_per_s(tiny, batch, context) == pytest.approx(rate, rel=0.1)
    for batch, rate in ((1, 359), (8, 1384), (32, 2338), (64, 2615)):
        assert decode_tokens_per_s(small, batch, 96) == pytest.approx(rate, rel=0.15)


def test_training_and_prefill_rates_are_those_measured() -> None:
    tiny, small = cost_model("this-cpu", TINY), cost_model("this-cpu", SMALL)
    assert 1 / tiny.actor_token_s == pytest.approx(8951, rel=0.03)
    assert 1 / small.actor_token_s == pytest.approx(2141, rel=0.1)
    assert 18_600 < 1 / tiny.prefill_token_s < 23_500
    assert 5_900 < 1 / small.prefill_token_s < 7_000


def test_larger_models_cost_more_of_everything() -> None:
    tiny, small = cost_model("this-cpu", TINY), cost_model("this-cpu", SMALL)
    for field in (
        "iteration_s",
        "sequence_s",
        "context_token_s",
        "prefill_token_s",
        "optimizer_s",
        "publish_s",
        "load_s",
    ):
        assert getattr(small, field) > getattr(tiny, field) > 0
    assert small.kv_capacity_tokens < tiny.kv_capacity_tokens


def test_unknown_hardware_names_the_known() -> None:
    with pytest.raises(ConfigurationError) as caught:
        cost_model("b42", TINY)
    assert "'b42'" in str(caught.value) and "this-cpu" in str(caught.value)


def test_a_model_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no room"):
        cost_model("this-cpu", model(layers=80, hidden=8192, heads=64, kv_heads=8))


def test_shape_of_a_folder_is_read_from_its_config(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 100,
        "vocab_size": 50,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = ModelShape.of(model(path=str(tmp_path), dtype="bfloat16"))
    assert shape.parameters == 2 * 50 * 64 + 2 * (2 * 64 * 128 + 2 * 64 * 64 + 3 * 64 * 100)
    assert shape.kv_bytes_per_token == 2 * 2 * 2 * 32 * 2


def test_a_folder_without_a_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no model shape"):
        cost_model("this-cpu", model(path=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(ConfigurationError, match="num_attention_heads"):
        cost_model("this-cpu", model(path=str(tmp_path)))
