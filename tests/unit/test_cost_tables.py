"""Hardware, models and efficiency: figures of the tables against published sizes, and every refusal with its list."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tiderl.cost import HARDWARE, MODELS, CostModel, cost_model
from tiderl.cost.hardware import ACCELERATORS, Efficiency, adjusted
from tiderl.cost.models import named_model
from tiderl.cost.roofline import accelerator_cost
from tiderl.data.errors import ConfigurationError
from tiderl.data.settings import ModelSettings

SETTINGS = ModelSettings("scratch", 1024, 8192, 0, (1,))


def h100(model: str = "Qwen2.5-7B", **changes: float) -> CostModel:
    return cost_model("H100", SETTINGS, named=model, efficiency=changes)


@pytest.mark.parametrize(
    ("name", "billions", "kib_per_token"),
    [
        ("Qwen2.5-7B", 7.62, 56),
        ("Qwen2.5-14B", 14.77, 192),
        ("Qwen2.5-32B", 32.76, 256),
        ("Qwen3-8B", 8.19, 144),
        ("Qwen3-VL-4B", 4.44, 144),
    ],
)
def test_a_published_model_has_its_published_size(name: str, billions: float, kib_per_token: int) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.003)
    assert MODELS[name].kv_bytes_per_token == kib_per_token * 1024


def test_the_derived_constants_are_those_of_the_reference_point() -> None:
    # 7 B on an H100: 7.5 ms, 40 us, 29 ns; prefill 35 us; 38 and 114 us at 400 TFLOP/s; 15.2 GB at 25 GB/s.
    cost = h100()
    assert cost.iteration_s == pytest.approx(7.5e-3, rel=0.01)
    assert cost.sequence_s == pytest.approx(40e-6, rel=0.01)
    assert cost.context_token_s == pytest.approx(29e-9, rel=0.02)
    assert cost.prefill_token_s == pytest.approx(35e-6, rel=0.01)
    assert cost.reference_token_s == pytest.approx(38e-6, rel=0.01)
    assert cost.actor_token_s == pytest.approx(114e-6, rel=0.01)
    assert cost.swap_one_way_s == pytest.approx(0.61, rel=0.01)
    assert cost.kv_capacity_tokens == pytest.approx(0.9e6, rel=0.01)


def test_a_rate_follows_the_figure_that_it_comes_from() -> None:
    shape, device, plain = MODELS["Qwen2.5-7B"], ACCELERATORS["H100"], Efficiency()
    base = accelerator_cost(shape, device, plain)
    wide = accelerator_cost(shape, replace(device, memory_bytes_per_s=2 * device.memory_bytes_per_s), plain)
    fast = accelerator_cost(shape, replace(device, flops_per_s=2 * device.flops_per_s), plain)
    assert wide.context_token_s == pytest.approx(base.context_token_s / 2)
    assert wide.iteration_s - plain.iteration_host_s == pytest.approx((base.iteration_s - plain.iteration_host_s) / 2)
    assert wide.prefill_token_s == base.prefill_token_s
    assert fast.prefill_token_s == pytest.approx(base.prefill_token_s / 2)
    assert fast.actor_token_s == pytest.approx(base.actor_token_s / 2)
    assert fast.context_token_s == base.context_token_s


def test_every_efficiency_factor_changes_something() -> None:
    base = h100()
    changed = {"memory_fraction": 0.8, "activation_bytes": 1e10, "network_bytes_per_s": 1e10}
    for name in Efficiency.__dataclass_fields__:
        value = changed.get(name, getattr(Efficiency(), name) / 2)
        assert h100(**{name: value}) != base, name


def test_h200_holds_what_an_h100_cannot() -> None:
    with pytest.raises(ConfigurationError, match=r"65\.5 GB of weights.*no room"):
        h100("Qwen2.5-32B")
    assert cost_model("H200", SETTINGS, named="Qwen2.5-32B").kv_capacity_tokens > 8192


def test_unknown_names_come_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="unknown hardware 'B200'") as hardware:
        cost_model("B200", SETTINGS)
    assert all(name in str(hardware.value) for name in HARDWARE)
    with pytest.raises(ConfigurationError, match="unknown model 'Qwen9'") as model:
        named_model("Qwen9")
    assert all(name in str(model.value) for name in MODELS)
    with pytest.raises(ConfigurationError, match="unknown efficiency factor 'mfu'") as factor:
        adjusted(Efficiency(), {"mfu": 0.4})
    assert "train_compute_fraction" in str(factor.value)
    with pytest.raises(ConfigurationError, match="unknown constant 'a0'") as constant:
        cost_model("H100", SETTINGS, named="Qwen3-8B", constants={"a0": 1.0})
    assert "iteration_s" in str(constant.value)


@pytest.mark.parametrize("value", [0.0, -1.0, 1.5, float("nan")])
def test_impossible_factors_are_refused(value: float) -> None:
    with pytest.raises(ConfigurationError, match="train_compute_fraction"):
        adjusted(Efficiency(), {"train_compute_fraction": value})


@pytest.mark.parametrize("name", ["max_batch", "kv_capacity_tokens"])
@pytest.mark.parametrize("value", [0, 0.5, 1.5, math.inf, math.nan])
def test_a_limit_is_a_whole_number_of_at_least_1(name: str, value: float) -> None:
    cost = h100()
    with pytest.raises(ConfigurationError, match=f"{name} must be a whole number of at least 1, given"):
        cost.with_constants({name: value})
    assert getattr(cost.with_constants({name: 2.0}), name) == 2
    with pytest.raises(ConfigurationError, match="iteration_s must be finite, at least 0, given"):
        cost.with_constants({"iteration_s": math.inf})


def test_constants_replace_what_was_derived() -> None:
    cost = cost_model("H100", SETTINGS, named="Qwen2.5-7B", constants={"iteration_s": 0.01, "max_batch": 64.0})
    assert cost.iteration_s == 0.01 and cost.max_batch == 64 and isinstance(cost.max_batch, int)
    assert cost.sequence_s == h100().sequence_s
    with pytest.raises(ConfigurationError, match=r"iteration_s must be finite, at least 0"):
        cost_model("H100", SETTINGS, named="Qwen2.5-7B", constants={"iteration_s": -1.0})


def test_this_cpu_takes_no_efficiency_factors() -> None:
    with pytest.raises(ConfigurationError, match="no efficiency factors"):
        cost_model("this-cpu", SETTINGS, efficiency={"memory_fraction": 0.5})
