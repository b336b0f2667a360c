"""An estimate of the time of a program from its operations and bytes, and the published figures of the chip."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from axcore.aot.chips import Chip
from axcore.aot.traffic import Traffic


class Efficiency(NamedTuple):
    """The share of the published figures that programs reach. With these, the estimates of two training steps are 0.96
    and 1.06 times their times on H200s (docs/aot.md). Link is not fitted."""

    compute: float = 0.68
    memory: float = 0.85
    link: float = 0.75


USUAL = Efficiency()

METHOD = (
    "Bound: the longest of compute, memory, link and network time at the published peaks, as if they overlapped. "
    "Estimate: matrix products at {compute:.0%} of the peak, then the memory traffic of all other instructions at "
    "{memory:.0%}; or link or network time at {link:.0%} if that is longer. Without overlap, the longer of these is "
    "added. Compute: the matrix products of the jaxpr. Memory: operands and results of XLA's instructions. Link and "
    "network: bytes that a ring sends; devices of one host share the bytes that leave it. Nothing is measured, and XLA "
    "chose its instructions without the device."
)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one run of a program. An estimate, not a measurement.

    Attributes:
        compute, memory, link, network: the time of each resource at its published peak. `link` connects the devices of
            a host or slice, and `network` connects these.
        elementwise: the part of `memory` of instructions without a matrix product.
        bound: no run is faster.
        step: the estimate, in which communication overlaps with work.
        apart: the estimate if no communication overlaps with work.
        mfu_bound: no run has a larger share of the peak FLOP/s; NaN if the program has no model FLOPs.
        mfu: the estimated share. Model FLOPs are three times those of the forward pass for training, so recomputation
            does not count.
        method: how the figures are computed.
    """

    compute: float
    memory: float
    elementwise: float
    link: float
    network: float
    bound: float
    step: float
    apart: float
    mfu_bound: float
    mfu: float
    method: str

    @classmethod
    def of(
        cls,
        chip: Chip,
        flops: Mapping[str, float],
        traffic: Traffic,
        model_flops: float,
        efficiency: Efficiency = USUAL,
    ) -> Estimate:
        """
        Args:
            flops: operations of one device, by dtype.
            model_flops: operations of one device without recomputation.
        """
        compute = sum(count / chip.peak.get(dtype, chip.peak["bfloat16"]) for dtype, count in flops.items())
        memory = traffic.memory / chip.bandwidth
        near = sum(sent for key, sent in traffic.sent.items() if not key.crosses or key.together > 1)
        far = sum(sent / key.together for key, sent in traffic.sent.items() if key.crosses)
        link, network = near / chip.link, far / chip.network
        elementwise = traffic.elementwise / chip.bandwidth
        bound = max(compute, memory, link, network)
        device = compute / efficiency.compute + elementwise / efficiency.memory
        sent = max(link, network) / efficiency.link
        step, apart = max(device, sent), device + sent
        peak = chip.peak["bfloat16"] if "bfloat16" in flops else chip.peak["float32"]

        def mfu(seconds: float) -> float:
            return model_flops / peak / seconds if seconds else float("nan")

        method = METHOD.format(**efficiency._asdict())
        return cls(compute, memory, elementwise, link, network, bound, step, apart, mfu(bound), mfu(step), method)
