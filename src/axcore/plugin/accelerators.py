"""Names of accelerators, such as `gpu-h100-8x4`, and globs of them."""

from __future__ import annotations

import contextlib
import dataclasses
import re

from axcore.config import ConfigError

_FORM = re.compile(r"(?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)-(?P<each>[0-9]+)(?:x(?P<hosts>[0-9]+))?")
EXAMPLES = (
    "cpu-8, gpu-h100-8, gpu-h100-8x4 (4 hosts of 8), tpu-v5p-512, tpu-v5e-256x4 (4 slices of 256), trn2-16x64, "
    "npu-x1-16 (any platform-kind-count)"
)
_BACKENDS = {"trn": "neuron"}
"""Platforms that JAX knows by another name."""
_CORES_PER_DEVICE = {"v4": 2, "v5p": 2}
"""TPUs whose names count cores instead of jax devices, and the number of cores per device."""


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """The hardware that a text such as `gpu-h100-8x4` names: PLATFORM-KIND-COUNT, then `x` and the hosts if several.

    The platform and the kind are free text, so a plugin can have mesh rules for hardware that axcore does not know.

    Attributes:
        platform: `cpu`, `gpu`, `tpu`, or any other: `npu` for `npu-x1-16`, `trn` for `trn2-16`.
        kind: `h100`, `v5e`, `x1`, `trn2`; empty for a platform without kinds, such as a CPU.
        count: the total number of jax devices; for a Trainium, the number of chips.
        hosts: the number of hosts, or of slices of a TPU. A slower network connects them.
    """

    text: str
    platform: str
    kind: str
    count: int
    hosts: int = 1

    @property
    def backend(self) -> str:
        """The name of the platform in JAX: `neuron` for `trn`, otherwise `platform`."""
        return _BACKENDS.get(self.platform, self.platform)

    @property
    def per_host(self) -> int:
        """Devices per host, or per slice of a TPU."""
        return self.count // self.hosts

    @classmethod
    def parse(cls, text: str) -> Accelerator:
        """
        Raises:
            ConfigError: the text has another form, or names no device.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(f"the target {text!r} is not an accelerator; examples: {EXAMPLES}")
        platform, _, kind = found["name"].partition("-")
        if platform in ("gpu", "tpu") and not kind:
            raise ConfigError(f"the target {text!r} must name the kind of {platform.upper()}; examples: {EXAMPLES}")
        if not kind and (series := platform.rstrip("0123456789")) != platform:  # trn2-16
            platform, kind = series, platform
        each, hosts = int(found["each"]), int(found["hosts"] or 1)
        cores = _CORES_PER_DEVICE.get(kind, 1) if platform == "tpu" else 1
        if each < 1 or hosts < 1 or each % cores:
            least = "an even number of cores" if cores == 2 else "at least one device and one host"
            raise ConfigError(f"the target {text!r} must name {least}; examples: {EXAMPLES}")
        return cls(text, platform, kind, each // cores * hosts, hosts)


_GLOB = re.compile(r"[a-z0-9*?\[\]!-]*[0-9*?\]]")
"""The characters of a glob of names, which end in a digit."""


def matchable(pattern: str) -> bool:
    """Whether a glob may match the name of an accelerator."""
    if any(wildcard in pattern for wildcard in "*?["):
        return _GLOB.fullmatch(pattern) is not None
    with contextlib.suppress(ConfigError):
        return bool(Accelerator.parse(pattern))
    return False
