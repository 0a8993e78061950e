"""The cost model: seconds for every kind of work, one constants object for the simulator and the bounds.

An engine iteration with batch b, attended context C and P prefilled tokens takes
`iteration_s + sequence_s * b + context_token_s * C + prefill_token_s * P` seconds, and each sequence of the batch gains
one token. The trainer's work is proportional to its tokens. Knows no clock and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from tiderl.data.errors import ConfigurationError

LIMITS = ("max_batch", "kv_capacity_tokens")
"""Constants that are counts."""


@dataclass(frozen=True)
class CostModel:
    """Seconds per unit of work on one rank, and the limits of one replica."""

    iteration_s: float  # a0: any engine iteration
    sequence_s: float  # b0: per sequence that samples a token in it
    context_token_s: float  # g0: per context position that a decoding sequence attends to
    prefill_token_s: float  # cP: per token prefilled
    max_batch: int  # sequences in one iteration
    kv_capacity_tokens: int  # KV positions that a replica's memory can hold
    reference_token_s: float
    forward_token_s: float
    backward_token_s: float
    optimizer_s: float  # clip and step
    publish_s: float  # write one version's weights
    load_s: float  # read them into an engine
    swap_one_way_s: float  # one load of one model's weights onto a rank; a round trip is two
    checkpoint_s: float  # write weights and optimizer state
    weight_bytes: int
    delta_fraction: float = 0.05  # of the weights that one update changes, for a weight sync by differences (assumed)
    kv_reload_token_s: float = 0.0  # per KV position from host memory; 0: the engine's memory is the host's
    pass_s: float = 0.0  # fixed, of each reference, forward or backward pass over a micro-batch
    turn_s: float = 0.0  # of a turn outside engine and environment: messages
    driver_turn_s: float = 0.0  # of the driver for each turn that ends: it takes them up one by one

    @property
    def actor_token_s(self) -> float:
        """Forward and backward of one trained token."""
        return self.forward_token_s + self.backward_token_s

    def divided_among(self, ranks: int) -> CostModel:
        """The same with the trainer's token work spread evenly over `ranks`; the exchange of gradients is not
        modelled."""
        return replace(
            self,
            reference_token_s=self.reference_token_s / ranks,
            forward_token_s=self.forward_token_s / ranks,
            backward_token_s=self.backward_token_s / ranks,
        )

    def with_constants(self, constants: Mapping[str, float]) -> CostModel:
        """The same with some constants replaced, by their names here. Raises `ConfigurationError` for an unknown one,
        for one that is negative or not finite, and for a limit that is no whole number of at least 1."""
        names = [field.name for field in fields(self)]
        for name, value in constants.items():
            if name not in names:
                raise ConfigurationError(
                    f"unknown constant {name!r}", where="sim.cost", hint=f"known: {', '.join(names)}"
                )
            if name in LIMITS and not (value >= 1 and math.isfinite(value) and value == int(value)):
                raise ConfigurationError(
                    f"{name} must be a whole number of at least 1, given {value}", where=f"sim.cost.{name}"
                )
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigurationError(f"{name} must be finite, at least 0, given {value}", where=f"sim.cost.{name}")
        counts = {name: int(value) for name, value in constants.items() if name in LIMITS}
        return replace(self, **{**constants, **counts})  # type: ignore[arg-type]
