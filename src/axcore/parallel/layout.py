"""A device mesh with its rules, and the sharding that they give to each array."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree, Shaped

from axcore.config import ConfigError, FrozenDict, matches
from axcore.config.errors import did_you_mean
from axcore.parallel.axes import LOGICAL_AXES, MAJOR_AXES, MeshAxes, entry_of, group_of
from axcore.parallel.context import ContextParallelism
from axcore.parallel.pipeline import PipelineSchedule

Axis = Any  # Any: the type of UNCONSTRAINED is private to jax
"""A logical axis: a name, None, or `PartitionSpec.UNCONSTRAINED`."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with its rules. See `Mesh` for `parameters`, `zero`, `optimizer_memory` and `context`.

    Attributes:
        manual: the mesh axes of the enclosing `shard_map`, over which arrays are already sharded.
        pipeline: the schedule of the stages; None without stages.
    """

    mesh: jax.sharding.Mesh | AbstractMesh
    rules: Mapping[str, MeshAxes]
    manual: frozenset[str] = frozenset()
    parameters: Mapping[str, Mapping[str, MeshAxes]] = FrozenDict()
    zero: Literal[0, 1, 2] = 0
    optimizer_memory: Literal["device", "host"] = "device"
    context: ContextParallelism | None = None
    pipeline: PipelineSchedule | None = None

    def inside(self, axes: Iterable[str]) -> Layout:
        """The layout inside a `shard_map` over these mesh axes."""
        return dataclasses.replace(self, manual=self.manual.union(axes))

    @property
    def automatic(self) -> tuple[str, ...]:
        """The mesh axes that no enclosing `shard_map` handles, in mesh order."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.manual)

    @property
    def num_shards(self) -> int:
        """The largest number of shards of an array here: the product of the sizes of the automatic axes."""
        return self.size_of(self.automatic)

    @property
    def stages(self) -> int:
        """The number of pipeline stages, which is the size of the mesh axis `pipeline`."""
        return int(self.mesh.shape.get("pipeline", 1))

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
        """The automatic mesh axes to which the rules map a logical axis, without those that the mesh lacks."""
        group = () if name is None else group_of(self.rules.get(name))
        return tuple(axis for axis in group if axis in self.automatic)

    def size_of(self, axes: MeshAxes) -> int:
        """The number of shards of a dimension that is sharded over these mesh axes."""
        sizes = dict(self.mesh.shape)
        return math.prod(sizes[axis] for axis in group_of(axes))

    def spec(self, axes: Sequence[Axis], shape: Sequence[int] | None = None) -> PartitionSpec:
        """The partition spec of an array with these logical axes.

        If several dimensions map to one mesh axis, the first of them uses it. The exception is `seq`, which does not
        use the mesh axes of later dimensions, even if those are too small to use them. If `seq` and `head` map to one
        axis, attention is sharded by heads and the residual stream by tokens (sequence parallelism, arXiv 2205.05198).

        Args:
            axes: The logical axis of each dimension. `PartitionSpec.UNCONSTRAINED` leaves the dimension to the
                compiler.
            shape: If given, trailing mesh axes are dropped from a dimension until they divide its size.
        """
        names = [None if name is PartitionSpec.UNCONSTRAINED else name for name in axes]
        taken: set[str] = set()
        dimensions: list[Axis] = []
        for index, name in enumerate(names):
            if axes[index] is PartitionSpec.UNCONSTRAINED:
                dimensions.append(axes[index])
                continue
            later = names[index + 1 :] if name == "seq" else []
            reserved = {axis for each in later for axis in self.axes_of(each)}
            group = tuple(axis for axis in self.axes_of(name) if axis not in taken | reserved)
            while shape is not None and shape[index] % self.size_of(group):
                group = group[:-1]
            taken.update(group)
            dimensions.append(entry_of(group))
        return PartitionSpec(*dimensions)

    def variable_spec(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """The partition spec of a parameter or other Variable.

        It is that of `spec`, unless `embed` follows a dimension in `MAJOR_AXES`, as in output projections. Then the
        mesh axes of `embed` shard that dimension, if they divide its size: shards of a major dimension are contiguous,
        so gathering them and scattering gradients requires no transposition.
        """
        groups = [group_of(entry) for entry in self.spec(axes)]
        embed = axes.index("embed") if "embed" in axes else 0
        for major in range(embed):
            group = groups[major] + groups[embed]
            if axes[major] in MAJOR_AXES and shape[major] % self.size_of(group) == 0:
                groups[major], groups[embed] = group, ()
                break
        return PartitionSpec(*map(entry_of, groups))

    def check_rules(self, declared: Iterable[str]) -> None:
        """Checks that every rule is for an axis in `LOGICAL_AXES` or in `declared`, the axes of a model.

        Raises:
            ConfigError: A rule is for another axis.
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
        """The sharding of each parameter or other Variable, by the rules or by those of its path in `parameters`.

        Args:
            arrays: A pytree of arrays or of `jax.ShapeDtypeStruct`.
            axes: The logical axes of each array, as tuples, in a pytree of the same structure.

        Raises:
            ConfigError: The size of a dimension is not divisible by the number of its shards.
        """

        def sharding_of(
            path: KeyPath[object], array: jax.Array | jax.ShapeDtypeStruct, names: tuple[str | None, ...]
        ) -> NamedSharding:
            where = jax.tree_util.keystr(path, simple=True, separator=".")
            spec = self._for_path(where).variable_spec(names, array.shape)
            for name, size, entry in zip(names, array.shape, spec, strict=True):
                if size % self.size_of(entry):
                    raise ConfigError(f"{where}: {self._not_divisible(name, size, entry, where)}")
            return NamedSharding(self.mesh, spec)

        return jax.tree_util.tree_map_with_path(sharding_of, arrays, axes)

    def _for_path(self, path: str) -> Layout:
        """The layout with the rules of one parameter."""
        own = [rules for pattern, rules in self.parameters.items() if matches(pattern, path)]
        return dataclasses.replace(self, rules=own[-1]) if own else self

    def _not_divisible(self, name: str | None, size: int, entry: MeshAxes, path: str) -> str:
        shards = self.size_of(entry)
        return (
            f"its dimension {name!r} of size {size} is not divisible by {shards}, the product of its mesh axes "
            f"({self.described(group_of(entry))}). The nearest possible products are {nearest_divisors(size, shards)}. "
            f"Change mesh.shape, or replicate it with mesh.parameters={{{path!r}: {{}}}}"
        )

    def described(self, axes: Iterable[str]) -> str:
        """Mesh axes with their sizes, as in `fsdp=4, tensor=2`."""
        return ", ".join(f"{axis}={self.mesh.shape[axis]}" for axis in axes)

    def check_parameters(self, paths: Iterable[str]) -> None:
        """Checks the patterns in `parameters`.

        Args:
            paths: the path of each parameter.

        Raises:
            ConfigError: A pattern matches no parameter.
        """
        paths = list(paths)
        for pattern in self.parameters:
            if not any(matches(pattern, path) for path in paths):
                raise ConfigError(f"mesh.parameters: {pattern!r} matches no parameter; see `axcore tree`")

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the layout that `constrain` and `shard_map` use, as `active_layout` returns it."""
        token = _layout.set(self)
        try:
            yield
        finally:
            _layout.reset(token)


def nearest_divisors(size: int, count: int) -> str:
    """The divisors of a size that are nearest to `count`, which is none: `4 or 8`."""
    divisors = [each for each in range(1, size + 1) if size % each == 0]
    below = max(each for each in divisors if each < count)
    above = min((each for each in divisors if each > count), default=below)
    return " or ".join(map(str, dict.fromkeys((below, above))))


_layout: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("axcore_layout", default=None)


def active_layout() -> Layout | None:
    """The layout of the enclosing `Layout.active` block; None outside of one."""
    return _layout.get()


def check_gathers(what: str, advice: str) -> None:
    """Checks that XLA can partition gathers from sharded arrays here. Inside a pipeline stage it cannot, over two or
    more further mesh axes, and ends the process.

    Args:
        what: what gathers, for the message.

    Raises:
        ConfigError: it cannot.
    """
    layout = _layout.get()
    if layout is None or not layout.manual:
        return
    axes = [f"{axis}={layout.mesh.shape[axis]}" for axis in layout.automatic if layout.mesh.shape[axis] > 1]
    if len(axes) > 1:
        raise ConfigError(
            f"{what} in pipeline stages allows one further mesh axis, but the mesh has {' and '.join(axes)}. {advice}"
        )


def is_sharded() -> bool:
    """Whether activations may be sharded over several devices."""
    layout = _layout.get()
    return layout is not None and layout.num_shards > 1


def constrain(x: Shaped[Array, ...], *axes: Axis) -> Shaped[Array, ...]:
    """Constrains the sharding of an activation by the rules of the active layout.

    Returns `x` unchanged if no layout is active, and inside a `shard_map` over all mesh axes. A dimension is replicated
    if its axis is None. Mesh axes that do not divide the size of a dimension are dropped, as for the single token of a
    decoding step.

    Args:
        axes: The logical axis of each dimension.
    """
    layout = _layout.get()
    if layout is None or not is_sharded():
        return x
    if len(axes) != x.ndim:
        raise ValueError(f"constrain: {len(axes)} axes {axes} do not match the dimensions of shape {x.shape}")
    # Inside a shard_map the mesh of the context tells which axes are manual.
    mesh = jax.sharding.get_abstract_mesh() if layout.manual else layout.mesh
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, layout.spec(axes, x.shape)))
