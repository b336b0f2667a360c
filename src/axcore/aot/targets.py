"""The devices that a program is compiled for, which need not be those of this machine."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import os
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from axcore.aot.chips import CHIPS, Chip, cpu
from axcore.aot.cuda import target_config
from axcore.config import ConfigError
from axcore.plugin import Accelerator

_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Settings that let libtpu compile on a machine without TPUs, and in several processes at once."""


@dataclasses.dataclass(frozen=True)
class Target:
    """An accelerator and the figures of its chip."""

    accelerator: Accelerator
    chip: Chip

    @classmethod
    def of(cls, text: str) -> Target:
        """The target of this name.

        Args:
            text: an accelerator, such as `gpu-h100-8x4`; see `Accelerator`.

        Raises:
            ConfigError: the text is not a valid name, or names a chip that axcore does not know.
        """
        accelerator = Accelerator.parse(text)
        if (accelerator.platform, accelerator.kind) == ("cpu", ""):
            return cls(accelerator, cpu(accelerator.per_host))
        for chip in CHIPS:
            if (chip.platform, chip.kind) == (accelerator.platform, accelerator.kind):
                return cls(accelerator, chip)
        known = ", ".join(["cpu", *(f"{chip.platform}-{chip.kind}" for chip in CHIPS)])
        raise ConfigError(
            f"the target {text!r} names an accelerator that axcore cannot compile for. Known: {known}, each followed "
            f"by the number of devices, as in gpu-h100-8x4"
        )

    @classmethod
    def local(cls) -> Target:
        """The devices of this process.

        Raises:
            ConfigError: axcore does not know their kind.
        """
        first, count = jax.devices()[0], jax.device_count()
        if first.platform == "cpu":
            return cls.of(f"cpu-{count}")
        for chip in CHIPS:
            if first.device_kind == chip.device_kind:
                hosts = jax.process_count()
                each = f"{count // hosts}x{hosts}" if hosts > 1 else str(count)
                accelerator = Accelerator(f"{chip.platform}-{chip.kind}-{each}", chip.platform, chip.kind, count, hosts)
                return cls(accelerator, chip)
        raise ConfigError(
            f"this machine has {first.device_kind} devices, whose figures axcore does not know. Name a target: "
            f"--target gpu-h100-8"
        )

    def devices(self) -> Sequence[jax.Device]:
        """The devices. Unless they are CPUs, they can only be used for compiling.

        Raises:
            ConfigError: the compiler is not installed, or there is no such topology.
        """
        match self.chip.platform:
            case "cpu":
                return self._cpus()
            case "gpu":
                return self._gpus()
            case _:
                return self._tpus()

    def host_of(self, device: jax.Device) -> int:
        """The host of a device, or the slice of a TPU."""
        if self.chip.platform == "tpu":
            return int(getattr(device, "slice_index", 0))
        return int(device.process_index) if self.chip.platform == "gpu" else device.id // self.accelerator.per_host

    def _cpus(self) -> Sequence[jax.Device]:
        count = self.accelerator.count
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # jax has already created its devices
            if len(jax.devices("cpu")) < count:
                raise ConfigError(
                    f"the target {self.accelerator.text!r} has {count} devices, and this process has already started "
                    f"JAX with {len(jax.devices('cpu'))}. Compile in a new process: axcore aot RECIPE --target "
                    f"{self.accelerator.text}"
                ) from None
        return jax.devices("cpu")[:count]

    def _gpus(self) -> Sequence[jax.Device]:
        _require("jax_plugins.xla_cuda13", "aot-cuda", "CUDA")
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # compiling needs none of cuBLAS, cuFFT, ...
        assert self.chip.cuda is not None
        hosts, each = self.accelerator.hosts, self.accelerator.per_host
        return topologies.get_topology_desc(
            platform="cuda", target_config=target_config(self.chip, self.chip.cuda), topology=f"1x{hosts}x{each}"
        ).devices

    def _tpus(self) -> Sequence[jax.Device]:
        _require("libtpu", "aot-tpu", "TPUs")
        for name, value in _TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        version, dimensions = self.chip.topology
        each = self.accelerator.per_host // (2 if self.chip.kind == "7x" else 1)
        shape = "x".join(map(str, torus(each, dimensions)))
        options = {"chip_config_name": "megacore"} if self.chip.kind == "v4" else {}
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{version}:{shape}", num_slices=self.accelerator.hosts, **options
        ).devices
        if len(found) != self.accelerator.count:
            raise ConfigError(
                f"the target {self.accelerator.text!r} has {self.accelerator.count} devices, and libtpu's topology "
                f"{version}:{shape} has {len(found)}. Use a power of two"
            )
        return found


def torus(chips: int, dimensions: int) -> tuple[int, ...]:
    """The shape of a slice: the one that is closest to a cube, with ascending sizes, followed by 1 for unused
    dimensions.

    Raises:
        ConfigError: there is no shape whose sizes are 1, 2 or multiples of 4.
    """

    def shapes(count: int) -> list[tuple[int, ...]]:
        sizes = [size for size in range(1, count + 1) if count % size == 0 and (size <= 2 or size % 4 == 0)]
        found = itertools.combinations_with_replacement(sizes, dimensions)
        return [shape for shape in found if math.prod(shape) == count]

    if fitting := shapes(chips):
        best = min(fitting, key=sum)
        return best if dimensions == 2 else tuple(sorted(best, key=lambda size: (size == 1, size)))
    below, above = (
        next(count for count in counts if shapes(count)) for counts in (range(chips, 0, -1), itertools.count(chips))
    )
    raise ConfigError(f"no slice has {chips} TPU chips. The nearest sizes are {below} and {above}")


def _require(module: str, extra: str, what: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigError(f"compiling for {what} requires the extra {extra}: pip install 'axcore[{extra}]'")
