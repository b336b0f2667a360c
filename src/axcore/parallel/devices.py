"""The order of devices in a mesh whose hosts or slices are connected by slower links."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import AxisType

from axcore.config import ConfigError


def device_mesh(sizes: Mapping[str, int], slow: Mapping[str, int], devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """The mesh with these axes.

    If there are several slices (TPU pods), the axes in `slow` span them, or the outermost axes if `slow` is empty. With
    one slice, the axes in `slow` span the hosts; if it is empty, devices stay in their order.

    Args:
        sizes: axis -> size, outermost first.
        slow: axis -> number of slices or hosts that it spans; see `Mesh.dcn`.

    Raises:
        ConfigError: `slow` does not multiply to the number of slices or hosts, or does not divide the axes.
    """
    types = (AxisType.Auto,) * len(sizes)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1 and not slow:
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
    count, groups = (slices, "slices") if slices > 1 else (len({device.process_index for device in devices}), "hosts")
    factors = [slow.get(axis, 1) for axis in sizes] if slow else _outermost(sizes, count)
    if math.prod(factors) != count:
        given = (
            f"mesh.dcn={dict(slow)} does not multiply to {count}"
            if slow
            else f"mesh.shape={dict(sizes)} has no axis that spans them"
        )
        raise ConfigError(f"the devices are in {count} {groups}, but {given}")
    inner = [size // factor for size, factor in zip(sizes.values(), factors, strict=True)]
    arranged = create_hybrid_device_mesh(inner, factors, devices, process_is_granule=slices == 1)
    return jax.sharding.Mesh(np.asarray(arranged), tuple(sizes), axis_types=types)


def _outermost(sizes: Mapping[str, int], count: int) -> list[int]:
    """The factor of each axis, if the outermost axes span all slices."""
    factors = []
    for size in sizes.values():
        factors.append(math.gcd(size, count))
        count //= factors[-1]
    return factors
