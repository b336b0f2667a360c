"""The device mesh, and the rules that map logical axes to mesh axes.

Parameters and activations have logical axes ("embed", "mlp", "batch"), and rules map each of them to mesh axes. Models
do not mention devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from axcore.config import Config, ConfigError, FrozenDict, PositiveInt
from axcore.parallel.axes import MESH_AXES, STANDARD_RULES, MeshAxes, group_of
from axcore.parallel.context import ContextParallelism
from axcore.parallel.devices import device_mesh
from axcore.parallel.layout import Layout
from axcore.parallel.pipeline import OneForwardOneBackward, PipelineSchedule


class Mesh(Config):
    """The shape of the device mesh and the rules from logical to mesh axes.

    One axis may have size -1, which is replaced by the number of remaining devices. The order of axes is
    that of `MESH_AXES`, not that of `shape`, so that the last ones connect neighbouring devices. An axis with another
    name comes before "tensor".

    Rules may name axes in `MESH_AXES` that `shape` lacks: they have no effect, so the same rules serve every shape.
    """

    shape: Mapping[str, PositiveInt | Literal[-1]] = FrozenDict({"data": -1, "fsdp": 1})
    dcn: Mapping[str, PositiveInt] = FrozenDict()
    """Axis -> number of slices or hosts that it spans. Only this factor of its size uses the slow links between slices
    or hosts; the rest uses the fast links. Empty: the outermost axes span the slices or hosts."""
    rules: Mapping[str, MeshAxes] = STANDARD_RULES
    """Logical axis -> mesh axes. The mesh axes of `embed` shard the first dimension of an output projection, `head` or
    `mlp`, where they divide its size."""
    parameters: Mapping[str, Mapping[str, MeshAxes]] = FrozenDict()
    """Path pattern, such as `decoder.layers.ffn.**` -> rules for the parameters that match, instead of `rules`; `{}`
    replicates them. The last matching pattern applies."""
    zero: Literal[0, 1, 2] = 0
    """What is sharded over the replicas of a parameter (ZeRO, arXiv 1910.02054): nothing (0), its optimizer state (1),
    or also the gradients that microbatches accumulate (2). Parameters themselves are sharded by rules, as in FSDP."""
    optimizer_memory: Literal["device", "host"] = "device"
    """Where optimizer state is kept between steps. With `host`, each step transfers it to the device and back."""
    context: ContextParallelism.Config | None = None
    """How attention computes when the rules shard `seq`; None: keys and values are gathered."""
    pipeline: PipelineSchedule.Config | None = None
    """The schedule of the stages of the axis `pipeline`; None: `OneForwardOneBackward`."""

    def make(self, devices: Sequence[jax.Device] | None = None) -> Layout:
        """The layout on these devices, by default on all devices.

        Raises:
            ConfigError: The axis sizes do not multiply to the number of devices, or a rule names an unknown mesh axis.
        """
        devices = jax.devices() if devices is None else devices
        sizes = self._sizes(len(devices), devices[0].platform)
        return self._layout(device_mesh(sizes, self.dcn, devices))

    def abstract(self, count: int, platform: str, device_kind: str = "") -> Layout:
        """The layout on `count` devices that need not exist, for tracing and lowering.

        Raises:
            ConfigError: See `make`.
        """
        sizes = self._sizes(count, platform)
        types = (AxisType.Auto,) * len(sizes)
        device = AbstractDevice(device_kind=device_kind, num_cores=None, platform=platform)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)
        return self._layout(mesh)

    def _layout(self, mesh: jax.sharding.Mesh | AbstractMesh) -> Layout:
        schedule = self.pipeline or OneForwardOneBackward.Config()
        return Layout(
            mesh,
            self.rules,
            parameters=self.parameters,
            zero=self.zero,
            optimizer_memory=self.optimizer_memory,
            context=None if self.context is None else self.context.build(),
            pipeline=schedule.build() if mesh.shape.get("pipeline", 1) > 1 else None,
        )

    def _sizes(self, count: int, platform: str) -> dict[str, int]:
        """The size of each mesh axis for `count` devices of a platform, in the order of the mesh."""
        sizes = {axis: self.shape[axis] for axis in sorted(self.shape, key=_position)}
        free = [axis for axis, size in sizes.items() if size == -1]
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if len(free) == 1 and fixed > 0 and count % fixed == 0:
            sizes[free[0]] = count // fixed
        if not sizes or any(size < 1 for size in sizes.values()) or math.prod(sizes.values()) != count:
            split = (
                ", or select N CPU devices with --target cpu-N or JAX_NUM_CPU_DEVICES=N" if platform == "cpu" else ""
            )
            raise ConfigError(
                f"mesh.shape: {sizes} does not match the number of {platform} devices, which is {count}. Set sizes "
                f"whose product is {count}{split}"
            )
        for axis, factor in self.dcn.items():
            if sizes.get(axis, 1) % factor:
                raise ConfigError(
                    f"mesh.dcn: {axis}={factor} is not a divisor of the size of this axis, {sizes.get(axis, 1)}"
                )
        _check(self.rules, "mesh.rules", sizes)
        self._check_strategies(sizes)
        for pattern, rules in self.parameters.items():
            _check(rules, f"mesh.parameters[{pattern!r}]", sizes)
        return sizes

    def _check_strategies(self, sizes: Iterable[str]) -> None:
        """Refuses a strategy without an axis that it applies to."""
        for field, strategy, axes, option in (
            ("pipeline", self.pipeline, ("pipeline",), "schedule"),
            ("context", self.context, group_of(self.rules.get("seq")), "strategy"),
        ):
            if strategy is not None and not set(axes) & set(sizes):
                raise ConfigError(
                    f"mesh.{field}: {type(strategy).target.__name__} has no effect, since mesh.shape has no axis "
                    f"{' or '.join(axes)}. Attach it with use({field!r}, size=..., {option}=...), which adds the axis, "
                    f"or set mesh.{field} to None"
                )


def _check(rules: Mapping[str, MeshAxes], where: str, sizes: Iterable[str]) -> None:
    for name, axes in rules.items():
        group = group_of(axes)
        if len(set(group)) < len(group):
            raise ConfigError(f"{where}: {name!r} maps to {group}, which contains an axis twice")
        for axis in group:
            if axis not in sizes and axis not in MESH_AXES:
                known = ", ".join(dict.fromkeys((*sizes, *MESH_AXES)))
                raise ConfigError(
                    f"{where}: {name!r} maps to {axis!r}, which is neither in mesh.shape nor a standard axis. "
                    f"Known: {known}"
                )


def _position(axis: str) -> float:
    return MESH_AXES.index(axis) if axis in MESH_AXES else MESH_AXES.index("tensor") - 0.5
