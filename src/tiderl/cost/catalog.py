"""From a configuration's names to a cost model: hardware, model, efficiency factors and single constants.

Every refusal of an unknown name lists the known ones; what would not fit the memory is refused, never cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiderl.cost.hardware import ACCELERATORS, Efficiency, adjusted
from tiderl.cost.model import CostModel
from tiderl.cost.models import ModelShape, named_model
from tiderl.cost.roofline import accelerator_cost
from tiderl.cost.this_cpu import MEMORY_BYTES, this_cpu
from tiderl.data.errors import ConfigurationError
from tiderl.data.settings import ModelSettings

THIS_CPU = "this-cpu"
HARDWARE: Mapping[str, int] = {THIS_CPU: MEMORY_BYTES} | {
    name: device.memory_bytes for name, device in ACCELERATORS.items()
}
"""Known hardware and its memory in bytes."""


def cost_model(
    hardware: str,
    model: ModelSettings,
    *,
    named: str = "auto",
    constants: Mapping[str, float] | None = None,
    efficiency: Mapping[str, float] | None = None,
) -> CostModel:
    """What a model costs on one rank of `hardware`.

    `named`: a model of the table, or `auto` for the shape of `model`, whose `max_context_tokens` counts in any case.
    `constants` replace fields of the result, `efficiency` factors of an accelerator. Raises `ConfigurationError` for an
    unknown name, a model without a known shape and a model larger than the memory.
    """
    if hardware not in HARDWARE:
        known = ", ".join(sorted(HARDWARE))
        raise ConfigurationError(f"unknown hardware {hardware!r}", where="sim.hardware", hint=f"known: {known}")
    shape = ModelShape.of(model) if named == "auto" else named_model(named)
    if hardware == THIS_CPU:
        if efficiency:
            what = f"{THIS_CPU} is described by measured seconds, it has no efficiency factors"
            raise ConfigurationError(what, where="sim.efficiency", hint="replace single constants with sim.cost")
        cost = this_cpu(shape, HARDWARE[hardware])
    else:
        cost = accelerator_cost(shape, ACCELERATORS[hardware], adjusted(Efficiency(), efficiency or {}))
    cost = cost.with_constants(constants or {})
    if cost.kv_capacity_tokens < model.max_context_tokens:
        raise ConfigurationError(
            f"the model ({cost.weight_bytes / 1e9:.1f} GB of weights) leaves no room for one context of "
            f"{model.max_context_tokens} tokens in {HARDWARE[hardware] / 1e9:.0f} GB",
            where="sim.hardware",
            hint="choose hardware with more memory or a smaller model",
        )
    return cost
