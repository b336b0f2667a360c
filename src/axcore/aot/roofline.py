"""An estimate of the time of a program from its operations and bytes, and the published figures of the chip."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from axcore.aot.chips import Chip
from axcore.aot.traffic import Traffic


class Efficiency(NamedTuple):
    """The fractions of the published figures that programs reach. With the defaults, the estimates of two training
    steps are 0.96 and 1.06 times the measured times on H200s (docs/aot.md). `link` was not fitted."""

    compute: float = 0.68
    memory: float = 0.85
    link: float = 0.75


USUAL = Efficiency()

METHOD = (
    "Bound: the longest of compute, memory, link and network time at the published peaks, as if they overlapped. "
    "Estimate: matrix products at {compute:.0%} of the peak plus the memory traffic of all other instructions at "
    "{memory:.0%}; or link or network time at {link:.0%} if that is longer. Without overlap: the sum of both. Compute: "
    "the matrix products of the jaxpr. Memory: operands and results of XLA's instructions. Link and network: bytes "
    "sent in a ring; the devices of one host share the bytes that leave it. Nothing was measured, and XLA selected its "
    "instructions without the device."
)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one run of a program. An estimate, not a measurement.

    Attributes:
        compute, memory, link, network: the time of each resource at its published peak. Links connect the devices of a
            host or slice, and the network connects hosts or slices.
        elementwise: the part of `memory` due to instructions without a matrix product.
        bound: the lower bound of the time.
        step: the estimated time if communication overlaps with work.
        without_overlap: the estimated time if no communication overlaps with work.
        mfu_bound: the upper bound of the MFU (model FLOPs utilization); NaN if the program has no model FLOPs.
        mfu: the estimated MFU. In training, model FLOPs are three times those of the forward pass, without
            recomputation.
        method: how the figures are computed.
    """

    compute: float
    memory: float
    elementwise: float
    link: float
    network: float
    bound: float
    step: float
    without_overlap: float
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
        """The estimate for one chip type.

        Args:
            flops: operations of one device, by dtype.
            model_flops: operations of one device without recomputation.
        """
        compute = sum(count / chip.peak.get(dtype, chip.peak["bfloat16"]) for dtype, count in flops.items())
        memory = traffic.memory / chip.bandwidth
        near = sum(sent for key, sent in traffic.sent.items() if not key.crosses_hosts or key.members_per_host > 1)
        far = sum(sent / key.members_per_host for key, sent in traffic.sent.items() if key.crosses_hosts)
        link, network = near / chip.link, far / chip.network
        elementwise = traffic.elementwise / chip.bandwidth
        bound = max(compute, memory, link, network)
        device = compute / efficiency.compute + elementwise / efficiency.memory
        sent = max(link, network) / efficiency.link
        step, without_overlap = max(device, sent), device + sent
        peak = chip.peak["bfloat16"] if "bfloat16" in flops else chip.peak["float32"]

        def mfu(seconds: float) -> float:
            return model_flops / peak / seconds if seconds else float("nan")

        method = METHOD.format(**efficiency._asdict())
        return cls(
            compute, memory, elementwise, link, network, bound, step, without_overlap, mfu(bound), mfu(step), method
        )
