"""Built-in features: strategies of parallelism by name, as edits of the mesh."""

from __future__ import annotations

from typing import Any, Literal, cast

from axcore.config import Config, ConfigError, FrozenDict, PositiveInt, has_field
from axcore.parallel.axes import entry_of, group_of
from axcore.parallel.context import ContextParallelism
from axcore.parallel.mesh import Mesh
from axcore.parallel.pipeline import PipelineSchedule
from axcore.plugin import ContextParallelismOffer, PipelineScheduleOffer, offered


def use_data(cfg: Config, size: PositiveInt) -> Config:
    """Replicates parameters over the mesh axis `data`; with `fsdp`, this is hybrid sharding.

    Args:
        cfg: The config of a trainer.
        size: The number of replicas.
    """
    return cfg.set(mesh=_with_axis(cfg, "data", size))


def use_fsdp(cfg: Config, size: PositiveInt | Literal[-1] = -1) -> Config:
    """Shards parameters, their optimizer state and the batch over the mesh axis `fsdp` (arXiv 2304.11277).

    Args:
        cfg: The config of a trainer.
        size: The number of devices that share the parameters; -1: all devices that the other axes do not use.
    """
    return cfg.set(mesh=_with_axis(cfg, "fsdp", size))


def use_tensor(cfg: Config, size: PositiveInt, sequence: bool = False) -> Config:
    """Shards heads, hidden features and the vocabulary over the mesh axis `tensor` (arXiv 1909.08053).

    Args:
        cfg: The config of a trainer.
        size: The number of devices.
        sequence: Whether the residual stream is sharded by tokens over the same axis (arXiv 2205.05198).
    """
    mesh = _with_axis(cfg, "tensor", size)
    seq = tuple(axis for axis in group_of(mesh.rules.get("seq")) if axis != "tensor") + ("tensor",) * sequence
    return cfg.set(mesh=mesh.set(rules=FrozenDict({**mesh.rules, "seq": entry_of(seq)})))


def use_expert(cfg: Config, size: PositiveInt) -> Config:
    """Shards the experts of mixtures, and the batch, over the mesh axis `expert`.

    Args:
        cfg: The config of a trainer.
        size: The number of devices that share the experts.
    """
    return cfg.set(mesh=_with_axis(cfg, "expert", size))


def use_zero(cfg: Config, stage: Literal[1, 2]) -> Config:
    """Shards optimizer state (1), or also accumulated gradients (2), over replicas of the parameters; see `Mesh.zero`.

    Args:
        cfg: The config of a trainer.
        stage: The stage of ZeRO. For stage 3, use `fsdp`.
    """
    return cfg.set(mesh=_mesh(cfg).set(zero=stage))


def use_optimizer_offload(cfg: Config) -> Config:
    """Keeps optimizer state in host memory between steps; see `Mesh.optimizer_memory`.

    Args:
        cfg: The config of a trainer.
    """
    return cfg.set(mesh=_mesh(cfg).set(optimizer_memory="host"))


def use_context(cfg: Config, size: PositiveInt, strategy: str | None = "all-to-all") -> Config:
    """Shards the sequence over the mesh axis `context`.

    Args:
        cfg: The config of a trainer.
        size: The number of devices that share each row.
        strategy: The name of a strategy of context parallelism that a plugin offers, with options if any, as in
            `ring-attention:balanced=false`. None: every device gathers all keys and values of its rows.
    """
    context = None if strategy is None else cast(ContextParallelism.Config, offered(ContextParallelismOffer, strategy))
    return cfg.set(mesh=_with_axis(cfg, "context", size).set(context=context))


def use_pipeline(cfg: Config, size: PositiveInt, schedule: str = "1f1b", chunks: PositiveInt | None = None) -> Config:
    """Divides the layers into stages over the mesh axis `pipeline`.

    The trainer must have at least as many `microbatches` as stages. With four times as many, stages are rarely idle.

    Args:
        cfg: The config of a trainer.
        size: The number of stages.
        schedule: The name of a schedule that a plugin offers, with options if any.
        chunks: The number of chunks of layers on each stage; None: that of the schedule.
    """
    pipeline = cast(PipelineSchedule.Config, offered(PipelineScheduleOffer, schedule))
    pipeline = pipeline if chunks is None else pipeline.set(chunks=chunks)
    return cfg.set(mesh=_with_axis(cfg, "pipeline", size).set(pipeline=pipeline))


def _mesh(cfg: Any) -> Mesh:  # Any: the config of a trainer, which is above this package
    if not has_field(cfg, "mesh"):
        raise ConfigError("only the config of a trainer has a mesh; this config has none")
    mesh: Mesh = cfg.mesh
    return mesh


def _with_axis(cfg: Config, axis: str, size: int) -> Mesh:
    """The mesh with this size of an axis. If no axis has size -1, the devices come from `fsdp` or `data`.

    If the axis is one of these two, the other takes the remaining devices, so that a later feature does not change the
    size that was asked for here.
    """
    mesh = _mesh(cfg)
    shape = {**mesh.shape, axis: size}
    if size == -1:
        shape.update({other: 1 for other, current in mesh.shape.items() if current == -1 and other != axis})
    elif -1 not in mesh.shape.values():
        current = mesh.shape.get(axis, 1)
        donors = [other for other in ("fsdp", "data") if other in shape and other != axis]
        fits = [other for other in donors if shape[other] * current % size == 0]
        if not fits:
            sizes = ", ".join(f"{other}={shape[other] * current}" for other in donors)
            raise ConfigError(
                f"the axis {axis!r} of size {size} takes its devices from fsdp or data, but in "
                f"mesh.shape={dict(mesh.shape)} none of these is a multiple of {size} ({sizes}). Set mesh.shape instead"
            )
        shape[fits[0]] = -1 if axis in ("fsdp", "data") else shape[fits[0]] * current // size
    return mesh.set(shape=FrozenDict(shape))
