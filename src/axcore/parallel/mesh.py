"""The device mesh, and how logical axis names map to it.

Parameters and activations carry logical names ("embed", "mlp", "batch"); rules map each to mesh axes. A model never
names a device.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from axcore.config import Config, ConfigError, FrozenDict
from axcore.config.errors import did_you_mean
from axcore.parallel.axes import LOGICAL_AXES

MeshAxes = str | tuple[str, ...] | None
Axis = Any
"""A logical axis: a name, None, or `PartitionSpec.UNCONSTRAINED`, whose type is private to jax."""

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
        sizes = self._sizes(len(devices))
        types = (AxisType.Auto,) * len(sizes)
        return Layout(jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices), self.rules)

    def abstract(self, count: int, platform: str, device_kind: str = "") -> Layout:
        """The layout on `count` devices that this process does not have, for tracing and lowering.

        Raises:
            ConfigError: see `make`.
        """
        sizes = self._sizes(count)
        types = (AxisType.Auto,) * len(sizes)
        device = AbstractDevice(device_kind=device_kind, num_cores=None, platform=platform)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)
        return Layout(mesh, self.rules)

    def _sizes(self, count: int) -> dict[str, int]:
        """The size of each axis over this many devices."""
        sizes = dict(self.shape)
        free = [axis for axis, size in sizes.items() if size == -1]
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if len(free) == 1 and fixed > 0 and count % fixed == 0:
            sizes[free[0]] = count // fixed
        if any(size < 1 for size in sizes.values()) or math.prod(sizes.values()) != count:
            raise ConfigError(f"mesh.shape: {sizes} does not fill {count} devices; its product must be equal")
        for name, axes in self.rules.items():
            group = group_of(axes)
            if len(set(group)) < len(group):
                raise ConfigError(f"mesh.rules: {name!r} maps to {group}, which names an axis twice")
            for axis in group:
                if axis not in sizes:
                    raise ConfigError(f"mesh.rules: {name!r} maps to {axis!r}; the mesh has {', '.join(sizes)}")
        return sizes


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with its rules."""

    mesh: jax.sharding.Mesh | AbstractMesh
    rules: Mapping[str, MeshAxes]
    manual: bool = False
    """Whether this is inside `shard_map`, where arrays are the shards of one device."""

    @property
    def platform(self) -> str:
        """Platform of the devices: "cpu", "gpu" or "tpu". They need not belong to this process.

        Raises:
            ConfigError: the mesh is abstract and has no `abstract_device`.
        """
        if isinstance(self.mesh, jax.sharding.Mesh):
            return str(self.mesh.devices.flat[0].platform)
        device = self.mesh.abstract_device
        if device is None:
            raise ConfigError(
                f"the abstract mesh {dict(self.mesh.shape)} has no platform; give it an abstract_device, as in "
                f"AbstractDevice(device_kind, num_cores, platform)"
            )
        return str(device.platform)

    @property
    def device_kind(self) -> str:
        """The devices as JAX names them, such as "NVIDIA H100 80GB HBM3"; empty if unknown."""
        if isinstance(self.mesh, jax.sharding.Mesh):
            return str(self.mesh.devices.flat[0].device_kind)
        device = self.mesh.abstract_device
        return "" if device is None else str(device.device_kind)

    def axes_of(self, name: str | None) -> tuple[str, ...]:
        """The mesh axes that the rules map a logical axis to; none inside `shard_map`."""
        return () if name is None or self.manual else group_of(self.rules.get(name))

    def size_of(self, axes: MeshAxes) -> int:
        """The number of shards of a dimension that is split over these mesh axes."""
        sizes = dict(self.mesh.shape)
        return math.prod(sizes[axis] for axis in group_of(axes))

    def spec(self, axes: Sequence[Axis], shape: Sequence[int] | None = None) -> PartitionSpec:
        """The partition spec of an array with these logical axes. A mesh axis is used for the first dimension that maps
        to it.

        Args:
            axes: `PartitionSpec.UNCONSTRAINED` in place of a name leaves the dimension to the compiler.
            shape: if given, trailing mesh axes are dropped from a dimension until it divides.
        """
        taken: set[str] = set()
        dimensions: list[Any] = []
        for index, name in enumerate(axes):
            if name is PartitionSpec.UNCONSTRAINED:
                dimensions.append(name)
                continue
            group = tuple(axis for axis in self.axes_of(name) if axis not in taken)
            while shape is not None and shape[index] % self.size_of(group):
                group = group[:-1]
            taken.update(group)
            dimensions.append(entry_of(group))
        return PartitionSpec(*dimensions)

    def check_rules(self, declared: Iterable[str]) -> None:
        """Checks that every rule is for an axis in `LOGICAL_AXES` or in `declared`, the axes of a model.

        Raises:
            ConfigError: a rule is for another axis.
        """
        known = sorted({*LOGICAL_AXES, *declared})
        for name in self.rules:
            if name not in known:
                raise ConfigError(
                    f"mesh.rules: {name!r} is not a logical axis of this model.{did_you_mean(name, known)} "
                    f"Known: {', '.join(known)}. A layer declares an axis of its own in `activation_axes`"
                )

    def sharding(self, *axes: Axis) -> NamedSharding:
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
                    f"{where} of shape {array.shape} with axes {names} does not divide over {sharding.spec} "
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


_layout: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("axcore_layout", default=None)


def active_layout() -> Layout | None:
    """The layout of the enclosing `Layout.active` block; None outside of one."""
    return _layout.get()


def is_sharded() -> bool:
    """Whether activations may be spread over several devices."""
    layout = _layout.get()
    return layout is not None and not layout.manual and any(size > 1 for size in layout.mesh.shape.values())


def constrain(x: jax.Array, *axes: Axis) -> jax.Array:
    """Constrains the sharding of an activation by the rules of the active layout.

    It is the identity if no layout is active, and inside `shard_map`. A dimension that is named None or does not divide
    over its mesh axes, such as the single token of a decoding step, is replicated.

    Args:
        axes: the logical axis of each dimension.
    """
    layout = _layout.get()
    if layout is None or not is_sharded():
        return x
    if len(axes) != x.ndim:
        raise ValueError(f"constrain names {len(axes)} dimensions, {axes}, of an array of shape {x.shape}")
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, layout.spec(axes, x.shape)))


def group_of(axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of a rule, or of one entry of a partition spec."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def entry_of(group: tuple[str, ...]) -> MeshAxes:
    """One entry of a partition spec."""
    return group if len(group) > 1 else group[0] if group else None
