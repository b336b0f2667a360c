"""The device mesh, and the rules that map logical axes to mesh axes.

Parameters and activations have logical axes ("embed", "mlp", "batch"), and rules map each of them to mesh axes. A model
never names a device.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree, Shaped

from axcore.config import Config, ConfigError, FrozenDict, PositiveInt
from axcore.config.errors import did_you_mean
from axcore.parallel.axes import LOGICAL_AXES

MeshAxes = str | tuple[str, ...] | None
Axis = Any  # Any: the type of UNCONSTRAINED is private to jax
"""A logical axis: a name, None, or `PartitionSpec.UNCONSTRAINED`."""

FSDP_RULES: Mapping[str, MeshAxes] = FrozenDict({"batch": ("data", "fsdp"), "embed": "fsdp"})
"""Shards batches over data and fsdp, and parameters with an `embed` axis over fsdp. Everything else is replicated."""


class Mesh(Config):
    """The shape of the device mesh and the rules from logical to mesh axes.

    One axis may have size -1, which is replaced by the number of remaining devices.
    """

    shape: Mapping[str, PositiveInt | Literal[-1]] = FrozenDict({"data": -1, "fsdp": 1})
    rules: Mapping[str, MeshAxes] = FSDP_RULES

    def make(self, devices: Sequence[jax.Device] | None = None) -> Layout:
        """The layout on these devices, by default on all devices.

        Slices of a TPU, and hosts of GPUs, are connected by a slower network. If the devices are in several slices, the
        first axis whose size is a multiple of their number spans them, and the other axes are inside a slice.

        Raises:
            ConfigError: The axis sizes do not multiply to the number of devices, no axis can span the slices, or a rule
                names an unknown mesh axis.
        """
        devices = jax.devices() if devices is None else devices
        sizes = self._sizes(len(devices), devices[0].platform)
        types = (AxisType.Auto,) * len(sizes)
        slices = len({getattr(device, "slice_index", 0) for device in devices})
        if slices == 1:
            mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
            return Layout(mesh, self.rules)
        outer = next((axis for axis, size in sizes.items() if size % slices == 0), None)
        if outer is None:
            raise ConfigError(
                f"mesh.shape: the devices are in {slices} slices, but no size of {sizes} is a multiple of {slices}. "
                f"Set the first axis, which should communicate least, to {slices}"
            )
        across = [slices if axis == outer else 1 for axis in sizes]
        inside = [size // count for size, count in zip(sizes.values(), across, strict=True)]
        grid = mesh_utils.create_hybrid_device_mesh(inside, across, devices)
        return Layout(jax.sharding.Mesh(grid, tuple(sizes), axis_types=types), self.rules)

    def abstract(self, count: int, platform: str, device_kind: str = "") -> Layout:
        """The layout on `count` devices that this process does not have, for tracing and lowering.

        Raises:
            ConfigError: See `make`.
        """
        sizes = self._sizes(count, platform)
        types = (AxisType.Auto,) * len(sizes)
        device = AbstractDevice(device_kind=device_kind, num_cores=None, platform=platform)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)
        return Layout(mesh, self.rules)

    def _sizes(self, count: int, platform: str) -> dict[str, int]:
        """The size of each mesh axis for `count` devices of a platform."""
        sizes = dict(self.shape)
        free = [axis for axis, size in sizes.items() if size == -1]
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if len(free) == 1 and fixed > 0 and count % fixed == 0:
            sizes[free[0]] = count // fixed
        if any(size < 1 for size in sizes.values()) or math.prod(sizes.values()) != count:
            split = ", or split the CPU into N devices with JAX_NUM_CPU_DEVICES=N" if platform == "cpu" else ""
            raise ConfigError(
                f"mesh.shape: {sizes} does not match the number of {platform} devices, which is {count}. Set sizes "
                f"whose product is {count}{split}"
            )
        for name, axes in self.rules.items():
            group = group_of(axes)
            if len(set(group)) < len(group):
                raise ConfigError(f"mesh.rules: {name!r} maps to {group}, which contains an axis twice")
            for axis in group:
                if axis not in sizes:
                    raise ConfigError(
                        f"mesh.rules: {name!r} maps to {axis!r}, which is not an axis of the mesh: {', '.join(sizes)}"
                    )
        return sizes


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with its rules."""

    mesh: jax.sharding.Mesh | AbstractMesh
    rules: Mapping[str, MeshAxes]
    manual: bool = False
    """Whether the code runs inside `shard_map`, where arrays are the shards of one device."""

    @property
    def platform(self) -> str:
        """The platform of the devices: "cpu", "gpu" or "tpu". The devices need not belong to this process.

        Raises:
            ConfigError: The mesh is abstract and has no `abstract_device`.
        """
        if isinstance(self.mesh, jax.sharding.Mesh):
            return str(self.mesh.devices.flat[0].platform)
        device = self.mesh.abstract_device
        if device is None:
            raise ConfigError(
                f"the abstract mesh {dict(self.mesh.shape)} has no platform. Pass it an abstract_device, as in "
                f"AbstractDevice(device_kind, num_cores, platform)"
            )
        return str(device.platform)

    @property
    def device_kind(self) -> str:
        """The `device_kind` of the devices in JAX, such as "NVIDIA H100 80GB HBM3"; empty if unknown."""
        if isinstance(self.mesh, jax.sharding.Mesh):
            return str(self.mesh.devices.flat[0].device_kind)
        device = self.mesh.abstract_device
        return "" if device is None else str(device.device_kind)

    def axes_of(self, name: str | None) -> tuple[str, ...]:
        """The mesh axes to which the rules map a logical axis; none inside `shard_map`."""
        return () if name is None or self.manual else group_of(self.rules.get(name))

    def size_of(self, axes: MeshAxes) -> int:
        """The number of shards of a dimension that is sharded over these mesh axes."""
        sizes = dict(self.mesh.shape)
        return math.prod(sizes[axis] for axis in group_of(axes))

    def spec(self, axes: Sequence[Axis], shape: Sequence[int] | None = None) -> PartitionSpec:
        """The partition spec of an array with these logical axes. If several dimensions map to one mesh axis, the first
        dimension uses it.

        Args:
            axes: The logical axis of each dimension. `PartitionSpec.UNCONSTRAINED` leaves the dimension to the
                compiler.
            shape: If given, trailing mesh axes are dropped from a dimension until they divide its size.
        """
        taken: set[str] = set()
        dimensions: list[Axis] = []
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
        """Checks that every rule maps an axis in `LOGICAL_AXES` or in `declared`, the axes of a model.

        Raises:
            ConfigError: A rule maps another axis.
        """
        known = sorted({*LOGICAL_AXES, *declared})
        for name in self.rules:
            if name not in known:
                raise ConfigError(
                    f"mesh.rules: {name!r} is not a logical axis of this model.{did_you_mean(name, known)} "
                    f"Known: {', '.join(known)}. A layer declares further axes in `activation_axes`"
                )

    def sharding(self, *axes: Axis) -> NamedSharding:
        """The sharding of an array with these logical axes."""
        return NamedSharding(self.mesh, self.spec(axes))

    def shardings(self, arrays: PyTree, axes: PyTree) -> PyTree[NamedSharding]:
        """The sharding of each array.

        Args:
            arrays: A pytree of arrays or of `jax.ShapeDtypeStruct`.
            axes: The logical axes of each array, as tuples, in a pytree of the same structure.

        Raises:
            ConfigError: The size of a dimension is not divisible by the number of its shards.
        """

        def place(
            path: KeyPath[object], array: jax.Array | jax.ShapeDtypeStruct, names: tuple[str | None, ...]
        ) -> NamedSharding:
            sharding = self.sharding(*names)
            try:
                sharding.shard_shape(array.shape)
            except ValueError:
                where = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ConfigError(
                    f"{where} of shape {array.shape} with axes {names} is not divisible into shards by {sharding.spec} "
                    f"on the mesh {dict(self.mesh.shape)}"
                ) from None
            return sharding

        return jax.tree_util.tree_map_with_path(place, arrays, axes)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes `constrain` place activations on this mesh."""
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
    """Whether activations may be sharded over several devices."""
    layout = _layout.get()
    return layout is not None and not layout.manual and any(size > 1 for size in layout.mesh.shape.values())


def constrain(x: Shaped[Array, ...], *axes: Axis) -> Shaped[Array, ...]:
    """Constrains the sharding of an activation by the rules of the active layout.

    Returns `x` unchanged if no layout is active, and inside `shard_map`. A dimension is replicated if its axis is None.
    Mesh axes that do not divide the size of a dimension are dropped, as for the single token of a decoding step.

    Args:
        axes: The logical axis of each dimension.
    """
    layout = _layout.get()
    if layout is None or not is_sharded():
        return x
    if len(axes) != x.ndim:
        raise ValueError(f"constrain: {len(axes)} axes {axes} do not match the dimensions of shape {x.shape}")
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, layout.spec(axes, x.shape)))


def group_of(axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of a rule or of one entry of a partition spec, as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def entry_of(group: tuple[str, ...]) -> MeshAxes:
    """The entry of a partition spec for these mesh axes."""
    return group if len(group) > 1 else group[0] if group else None
