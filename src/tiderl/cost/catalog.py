"""The known hardware by name, and the one way to a cost model from a configuration's names."""

from __future__ import annotations

from tiderl.cost.model import CostModel, Hardware, ModelShape
from tiderl.cost.this_cpu import MEMORY_BYTES, this_cpu
from tiderl.data.errors import ConfigurationError
from tiderl.data.settings import ModelSettings

HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware for hardware in (Hardware("this-cpu", memory_bytes=MEMORY_BYTES, cost=this_cpu),)
}


def cost_model(hardware: str, model: ModelSettings) -> CostModel:
    """What `model` costs on one rank of `hardware`.

    Raises `ConfigurationError` for an unknown name, a model without a known shape and a model larger than the memory.
    """
    known = HARDWARE.get(hardware)
    if known is None:
        raise ConfigurationError(
            f"unknown hardware {hardware!r}",
            where="sim.hardware",
            hint=f"known: {', '.join(sorted(HARDWARE))}",
        )
    cost = known.cost(ModelShape.of(model), known.memory_bytes)
    if cost.kv_capacity_tokens < model.max_context_tokens:
        raise ConfigurationError(
            f"the model ({cost.weight_bytes / 1e9:.1f} GB of weights) leaves no room for one context of "
            f"{model.max_context_tokens} tokens in {known.memory_bytes / 1e9:.0f} GB",
            where="sim.hardware",
            hint="choose hardware with more memory or a smaller model",
        )
    return cost
