"""Collectives that stages of a pipeline must not run in their tasks."""

from __future__ import annotations

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from axcore.config import ConfigError
from axcore.parallel import Layout


def check_permutes(jaxpr: Jaxpr | ClosedJaxpr, layout: Layout) -> None:
    """Checks that no task of a stage contains a collective-permute.

    Stages run different tasks at the same time. Other collectives connect devices of one stage only. But all devices of
    the program take part in XLA's collective-permute, so that of one stage would meet another one of a different stage:
    results are wrong, or devices wait forever.

    Args:
        jaxpr: the training step.

    Raises:
        ConfigError: a task contains one.
    """
    if not _permutes(jaxpr, is_stage=False, is_task=False):
        return
    advice = "Use all_gather or all_to_all in its place"
    if layout.context is not None:
        sizes = ", ".join(f"{axis}={layout.size_of(axis)}" for axis in layout.axes_of("seq"))
        form = type(layout.context).__name__
        advice = f"If mesh.context={form} with {sizes} calls it, set mesh.context to AllToAll or None, or pipeline to 1"
    raise ConfigError(
        f"mesh.shape: the model calls ppermute inside the stages of the axis pipeline={layout.stages}. XLA runs it on "
        f"the devices of all stages together, but stages run different layers at different times. {advice}"
    )


def _permutes(jaxpr: Jaxpr | ClosedJaxpr, is_stage: bool, is_task: bool) -> bool:
    """Whether a task contains a collective-permute. A stage is a `shard_map` over `pipeline`, and a task is a branch of
    a conditional in it."""
    for step in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if step.primitive.name == "ppermute" and is_task:
            return True
        inside_task = is_task or (is_stage and step.primitive.name == "cond")
        inside_stage = is_stage or "pipeline" in step.params.get("newly_manual_axes", ())
        for value in jax.tree.leaves(list(step.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value) and _permutes(value, inside_stage, inside_task):
                return True
    return False


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)
