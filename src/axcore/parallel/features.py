"""Built-in features: strategies of parallelism by name, as edits of the mesh."""

from __future__ import annotations

from typing import Any, cast

from axcore.config import Config, ConfigError, PositiveInt, has_field
from axcore.parallel.context import ContextParallelism
from axcore.parallel.mesh import Mesh
from axcore.plugin import ContextParallelismOffer, offered


def use_context(cfg: Config, size: PositiveInt, form: str | None = "all-to-all") -> Config:
    """Shards the sequence over the mesh axis `context`.

    Args:
        cfg: The config of a trainer.
        size: The number of devices that share each row.
        form: The name of a form of context parallelism that a plugin offers, with options if any, as in
            `ring-attention:balanced=false`. None: every device gathers all keys and values of its rows.
    """
    context = None if form is None else cast(ContextParallelism.Config, offered(ContextParallelismOffer, form))
    return cfg.set(mesh=_with_axis(cfg, "context", size).set(context=context))


def _with_axis(cfg: Any, axis: str, size: int) -> Mesh:  # Any: the config of a trainer, which is above this package
    """The mesh with this size of an axis. If no other axis has size -1, its devices come from `fsdp` or `data`."""
    if not has_field(cfg, "mesh"):
        raise ConfigError(f"the axis {axis!r} is set in the mesh of a trainer, and this is not the config of a trainer")
    mesh: Mesh = cfg.mesh
    shape = {**mesh.shape, axis: size}
    if -1 not in shape.values():
        held = mesh.shape.get(axis, 1)
        fits = [other for other in ("fsdp", "data") if other in shape and shape[other] * held % size == 0]
        shape.update({other: shape[other] * held // size for other in fits[:1]})
    return mesh.set(shape=shape)
