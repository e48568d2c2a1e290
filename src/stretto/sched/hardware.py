"""Hardware numbers: the one place that knows what a device and a link can do.

Peak figures are vendor data; `flops` and `bandwidth_bytes_s` are what dense bf16 work was measured to reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """Time to hand a value over: `alpha_s` + bytes / `bytes_s`."""

    alpha_s: float
    bytes_s: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha_s + nbytes / self.bytes_s if nbytes else 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device kind."""

    name: str
    flops: float
    """Dense bf16 matrix products that large shapes reach, per second."""
    bandwidth_bytes_s: float
    memory_bytes: int
    usable: float = 0.93
    """Share of memory that a plan may fill; the rest is context, graph pools and workspace."""
    attention_share: float = 0.70
    """Share of `flops` that fused attention reaches."""
    gemm_share: float = 0.86
    """Share of `flops` that the matrix products of a transformer block reach, with norms and gates between them."""

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * self.usable)


H200 = Hardware("NVIDIA H200", flops=790e12, bandwidth_bytes_s=4.3e12, memory_bytes=141 * 10**9)
H100 = Hardware("NVIDIA H100 80GB HBM3", flops=740e12, bandwidth_bytes_s=3.0e12, memory_bytes=80 * 10**9)
CPU = Hardware("CPU", flops=1e11, bandwidth_bytes_s=2e10, memory_bytes=16 * 10**9)
DEVICES = {h.name: h for h in (H200, H100, CPU)}

LINKS = {
    "local": Link(0.0, float("inf")),
    "peer": Link(20e-6, 300e9),  # NVLink, one direction, with the hand-over of a message
    "pcie": Link(30e-6, 45e9),
    "node": Link(60e-6, 40e9),  # one network card a device
}
"""Link kind -> cost. `peer` joins devices of one node, `node` devices of different nodes."""


def hardware(name: str) -> Hardware:
    """Return a device kind by its name.

    Raises:
        ConfigError: if it is not known.
    """
    if name not in DEVICES:
        raise ConfigError("device", got=repr(name), expected=f"one of {sorted(DEVICES)}")
    return DEVICES[name]
