"""Published figures of the accelerators that axcore compiles for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import NamedTuple

from axcore.plugin import Accelerator

GIB = 2**30
XLA_GPU_FRACTION = 0.75
"""The fraction of a GPU's memory that JAX reserves by default."""


class Cuda(NamedTuple):
    """What XLA needs to know to compile for a GPU without having one.

    Attributes:
        capability: (major, minor) compute capability.
        cores: streaming multiprocessors.
        shared: bytes of shared memory per core, and per block with opt-in.
        cache: bytes of L2 cache.
        clock: GHz.
    """

    capability: tuple[int, int]
    cores: int
    shared: tuple[int, int]
    cache: int
    clock: float


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator. All figures are per JAX device, which is half of a chip for TPU7x.

    Attributes:
        kind: the kind in the name of a target, such as `h100` in `gpu-h100-8`.
        device_kind: the name of the device in JAX.
        memory: bytes of memory.
        usable: bytes that the compiler leaves to a program; for GPUs see `limit`.
        peak: dense FLOP/s of matrix products, by dtype as in `axcore.aot.flops.Flops`.
        bandwidth: memory bandwidth in bytes/s.
        link: bandwidth in bytes/s, in one direction, of all links from the device to others of its host (GPU) or slice
            (TPU).
        network: bandwidth in bytes/s, in one direction, from the device to other hosts or slices.
        topology: the name of a TPU in libtpu's topologies, and the number of dimensions of its torus.
        cuda: what XLA needs to know about a GPU.
    """

    kind: str
    platform: str
    device_kind: str
    memory: int
    usable: int
    peak: Mapping[str, float]
    bandwidth: float
    link: float
    network: float
    topology: tuple[str, int] = ("", 0)
    cuda: Cuda | None = None

    @property
    def limit(self) -> int:
        """Bytes that a program may use. On a GPU this is the fraction that JAX reserves: XLA_CLIENT_MEM_FRACTION, by
        default 0.75."""
        if self.platform != "gpu":
            return self.usable
        return int(self.usable * float(os.environ.get("XLA_CLIENT_MEM_FRACTION", XLA_GPU_FRACTION)))


def _tpu(
    kind: str,
    device_kind: str,
    memory: float,
    usable: float,
    bf16: float,
    int8: float,
    bandwidth: float,
    link: float,
    network: float,
    topology: tuple[str, int],
) -> Chip:
    full = bf16 * 1e12
    peak = {"bfloat16": full, "int8": int8 * 1e12, "float8": int8 * 1e12, "float32": full, "float32_highest": full / 6}
    sizes = int(memory * GIB), int(usable * GIB)
    return Chip(kind, "tpu", device_kind, *sizes, peak, bandwidth * 1e12, link * 1e9, network * 1e9, topology)


def _gpu(
    kind: str,
    device_kind: str,
    memory: int,
    bf16: float,
    fp8: float,
    tf32: float,
    fp32: float,
    bandwidth: float,
    link: float,
    network: float,
    cuda: Cuda,
) -> Chip:
    teraflops = {"bfloat16": bf16, "float8": fp8, "int8": fp8, "float32": tf32, "float32_highest": fp32}
    peak = {dtype: value * 1e12 for dtype, value in teraflops.items()}
    return Chip(kind, "gpu", device_kind, memory, memory, peak, bandwidth * 1e12, link * 1e9, network * 1e9, cuda=cuda)


_HOPPER = (233_472, 232_448)
CHIPS: tuple[Chip, ...] = (
    # TPUs: Google Cloud's pages of each TPU; links from "How to scale your model" (Austin et al. 2025); `usable` is the
    # limit that libtpu 0.0.52 reports. A product of float32 is one pass over bfloat16 at JAX's default precision, and
    # six at `jax.lax.Precision.HIGHEST`.
    _tpu("v4", "TPU v4", 32, 31.25, 275, 275, 1.2, 270, 6.25, ("v4", 3)),
    _tpu("v5e", "TPU v5 lite", 16, 15.75, 197, 393, 0.81, 180, 3.1, ("v5e", 2)),
    _tpu("v5p", "TPU v5", 95, 95.73, 459, 918, 2.77, 540, 6.25, ("v5p", 3)),
    _tpu("v6e", "TPU v6 lite", 32, 31.24, 918, 1836, 1.64, 360, 12.5, ("v6e", 2)),
    _tpu("7x", "TPU7x", 96, 94.74, 1153, 2307, 3.69, 300, 6.25, ("tpu7x", 3)),
    # GPUs: NVIDIA's data sheets, dense figures; one 400 Gb/s adapter per GPU (200 Gb/s for A100). Products of float32
    # use TF32 at JAX's default precision.
    _gpu(
        "a100", "NVIDIA A100-SXM4-80GB", 84_987_740_160, 312, 624, 156, 19.5, 2.04, 300, 25,
        Cuda((8, 0), 108, (167_936, 166_912), 41_943_040, 1.41),
    ),
    _gpu(
        "h100", "NVIDIA H100 80GB HBM3", 84_942_979_072, 989, 1979, 494, 67, 3.35, 450, 50,
        Cuda((9, 0), 132, _HOPPER, 52_428_800, 1.98),
    ),
    _gpu(
        "h200", "NVIDIA H200", 150_109_880_320, 989, 1979, 494, 67, 4.8, 450, 50,
        Cuda((9, 0), 132, _HOPPER, 62_914_560, 1.98),
    ),
    _gpu(
        "b200", "NVIDIA B200", 191_503_532_032, 2250, 4500, 1125, 75, 7.7, 900, 50,
        Cuda((10, 0), 148, _HOPPER, 132_644_864, 1.965),
    ),
)  # fmt: skip


def device_kind(accelerator: Accelerator) -> str:
    """The name in JAX of the devices of an accelerator; its own kind if axcore does not know them."""
    named = (accelerator.platform, accelerator.kind)
    known = {(chip.platform, chip.kind): chip.device_kind for chip in CHIPS} | {("cpu", ""): "cpu"}
    return known.get(named, accelerator.kind)


def cpu(devices_per_host: int) -> Chip:
    """One of the CPU devices that share this machine's memory. The other figures are rough values for two cores."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices_per_host
    peak = {"float32": 1e11, "float32_highest": 1e11, "bfloat16": 5e10}
    return Chip("", "cpu", "cpu", memory, memory, peak, 2e10 / devices_per_host, 1e10, 1e9)
