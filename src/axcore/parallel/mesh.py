"""The device mesh, and how logical axis names map to it.

Parameters and activations carry logical names ("embed", "mlp", "batch"); rules map each to mesh axes. A model never
names a device.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from axcore.config import Config, ConfigError, FrozenDict

MeshAxes = str | tuple[str, ...] | None

FSDP_RULES: Mapping[str, MeshAxes] = FrozenDict({"batch": ("data", "fsdp"), "embed": "fsdp"})
"""Batches over data and fsdp, every parameter with an `embed` dimension over fsdp; all else replicated."""


class Mesh(Config):
    """The shape of the device mesh and the rules from logical to mesh axes.

    One axis may have size -1: it takes the devices that are left.
    """

    shape: Mapping[str, int] = FrozenDict({"data": -1, "fsdp": 1})
    rules: Mapping[str, MeshAxes] = FSDP_RULES

    def make(self, devices: Sequence[jax.Device] | None = None) -> Layout:
        """The layout on these devices (all, by default).

        Raises:
            ConfigError: the shape does not use exactly the devices there are, or a rule names an unknown mesh axis.
        """
        devices = jax.devices() if devices is None else devices
        sizes = dict(self.shape)
        free = [axis for axis, size in sizes.items() if size == -1]
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if len(free) == 1 and fixed > 0 and len(devices) % fixed == 0:
            sizes[free[0]] = len(devices) // fixed
        if any(size < 1 for size in sizes.values()) or math.prod(sizes.values()) != len(devices):
            raise ConfigError(f"mesh.shape: {sizes} does not fill {len(devices)} devices; its product must be equal")
        for name, axes in self.rules.items():
            group = (axes,) if isinstance(axes, str) else axes or ()
            if len(set(group)) < len(group):
                raise ConfigError(f"mesh.rules: {name!r} maps to {group}, which names an axis twice")
            for axis in group:
                if axis not in sizes:
                    raise ConfigError(f"mesh.rules: {name!r} maps to {axis!r}; the mesh has {', '.join(sizes)}")
        mesh = jax.make_mesh(
            tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices
        )
        return Layout(mesh, self.rules)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with its rules."""

    mesh: jax.sharding.Mesh
    rules: Mapping[str, MeshAxes]

    @property
    def platform(self) -> str:
        """Of the devices: "cpu", "gpu" or "tpu", of this process or of a topology that is only compiled for."""
        return str(_device(self.mesh).platform)

    @property
    def device_kind(self) -> str:
        return str(_device(self.mesh).device_kind)

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """Logical axes of one array -> its partition spec. A mesh axis serves the first dimension that asks for it."""
        taken: set[str] = set()
        dimensions: list[MeshAxes] = []
        for name in axes:
            wanted = self.rules.get(name) if name is not None else None
            group = (wanted,) if isinstance(wanted, str) else tuple(wanted or ())
            group = tuple(axis for axis in group if axis not in taken)
            taken.update(group)
            dimensions.append(group if len(group) > 1 else group[0] if group else None)
        return PartitionSpec(*dimensions)

    def sharding(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes))

    def shardings(self, arrays: Any, axes: Any) -> Any:
        """A tree of arrays (or shapes) and its tree of logical axes -> a tree of shardings.

        Raises:
            ConfigError: a dimension does not divide over its mesh axes.
        """

        def place(path: Any, array: Any, names: tuple[str | None, ...]) -> NamedSharding:
            sharding = self.sharding(*names)
            try:
                sharding.shard_shape(array.shape)
            except ValueError:
                where = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ConfigError(
                    f"parameter {where} of shape {array.shape} with axes {names} does not divide over {sharding.spec} "
                    f"of the mesh {dict(self.mesh.shape)}"
                ) from None
            return sharding

        return jax.tree_util.tree_map_with_path(place, arrays, axes)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While active, `constrain` places activations on this mesh."""
        token = _layout.set(self)
        try:
            yield
        finally:
            _layout.reset(token)


def _device(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Any:
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return mesh.abstract_device or jax.devices()[0]
    return mesh.devices.flat[0]


_layout: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("axcore_layout", default=None)


def active_layout() -> Layout | None:
    """The layout whose `active` block this runs in."""
    return _layout.get()


@contextlib.contextmanager
def on_one_device() -> Iterator[None]:
    """For code that sees the shards of one device: no layout is active in it."""
    token = _layout.set(None)
    try:
        yield
    finally:
        _layout.reset(token)


def is_sharded() -> bool:
    """Whether activations may be spread over several devices."""
    layout = _layout.get()
    return layout is not None and layout.mesh.size > 1


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Tells the compiler how an activation lies on the mesh; the identity where no layout is active."""
    layout = _layout.get()
    if layout is None or not is_sharded():
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(*axes))
