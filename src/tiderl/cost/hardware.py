"""Accelerators by name: what their data sheets promise, and which part of it this kind of work gets.

A data sheet is a fact with a source; an efficiency factor is an assumption with a name, adjustable one by one. Seconds
come from both together, in `roofline.py`. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from tiderl.data.errors import ConfigurationError


@dataclass(frozen=True)
class Accelerator:
    """Peak figures of one device, each in one direction."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: float
    """Dense bfloat16, without sparsity."""
    host_bytes_per_s: float
    """PCIe to the host's memory."""
    link_bytes_per_s: float
    """To the other devices of the host."""


ACCELERATORS: Mapping[str, Accelerator] = {
    device.name: device
    for device in (
        Accelerator("A100", 80 * 10**9, 2.039e12, 312e12, 32e9, 300e9),
        Accelerator("H100", 80 * 10**9, 3.35e12, 989.4e12, 64e9, 450e9),
        Accelerator("H200", 141 * 10**9, 4.8e12, 989.4e12, 64e9, 450e9),
        Accelerator("H800", 80 * 10**9, 3.35e12, 989.4e12, 64e9, 200e9),
    )
}
"""SXM modules; A100 is the 80 GB one. Source: NVIDIA's data sheets of A100, H100 and H200 (tensor-core figures without
sparsity; PCIe generation 4 or 5 with 16 lanes; half of the quoted two-way NVLink rate). H800 is an H100 whose NVLink is
cut to 400 GB/s both ways together."""


@dataclass(frozen=True)
class Efficiency:
    """What remains of the peaks, and what no peak covers. All assumed; each is a key of `sim.efficiency`.

    The compute fractions are between 0.39 and 0.46, which is what 390 to 455 TFLOP/s measured per H800 in training with
    dynamic batches means (AReaL, 2025); decoding constants reproduce 7.5 ms + 40 us a sequence + 29 ns a position for
    7 B parameters on an H100.
    """

    memory_fraction: float = 0.9
    """Of the memory, for weights, activations and KV."""
    activation_bytes: float = 5e9
    """Kept free beside weights and KV: activations, graphs, communication buffers."""
    weight_read_fraction: float = 0.8
    """Of the memory bandwidth, while a decoding iteration reads the weights."""
    kv_read_fraction: float = 0.6
    """Of the memory bandwidth, while attention reads KV page by page."""
    decode_compute_fraction: float = 0.6
    """Of the arithmetic, for one more sequence in the batch."""
    prefill_compute_fraction: float = 0.44
    train_compute_fraction: float = 0.404
    """400 TFLOP/s of an H100."""
    iteration_host_s: float = 1.8e-3
    """Scheduling and kernel launches of one engine iteration."""
    sequence_host_s: float = 14e-6
    """Sampling and bookkeeping of one sequence in it."""
    host_copy_fraction: float = 0.39
    """Of PCIe: pinned copies of many tensors, 25 GB/s of 64."""
    network_bytes_per_s: float = 20e9
    """Of one rank to other hosts: weights to rollout, gradients between trainers."""


def adjusted(efficiency: Efficiency, changes: Mapping[str, float]) -> Efficiency:
    """`efficiency` with some factors replaced. Raises `ConfigurationError` for an unknown or impossible one."""
    known = [field.name for field in fields(efficiency)]
    for name, value in changes.items():
        if name not in known:
            raise ConfigurationError(
                f"unknown efficiency factor {name!r}", where="sim.efficiency", hint=f"known: {', '.join(known)}"
            )
        if not value > 0 or (name.endswith("_fraction") and value > 1):
            raise ConfigurationError(
                f"{name} must be more than 0{' and at most 1' if name.endswith('_fraction') else ''}, given {value}",
                where=f"sim.efficiency.{name}",
            )
    return replace(efficiency, **changes)
