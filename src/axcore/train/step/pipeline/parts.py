"""The model of a pipeline in three parts: what runs before the layers, one layer, and what runs after them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from axcore.config import ConfigError
from axcore.module import Collections, ContextError, Functional, Layer, LossSum, Rngs, Tree, current, invoke, root
from axcore.module.context import inside
from axcore.module.pure import check_no_tracers, split
from axcore.train.step.objective import Batch, Objective
from axcore.train.step.pipeline.stack import PipelinedStack

type Hidden = PyTree
"""What a layer takes and returns, usually [batch, seq, embed]."""


class _Reached(Exception):
    """Ends a call of the model where the layers begin."""

    def __init__(self, x: Hidden, args: tuple[PyTree, ...]):
        self.x, self.args_of_layers = x, args


class _Replacement(Layer):
    """Runs a function in place of the stack."""

    run: Callable[..., Hidden]

    def __call__(self, x: Hidden, *args: PyTree) -> Hidden:
        return self.run(x, *args)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a model.

    `like` has the structure of its parameters and other Variables; the values of the arrays do not matter. Unless
    stated otherwise, the arguments `params` and `state` are those of the rest of the model, without the layers.
    """

    fn: Functional
    objective: Objective
    stack: PipelinedStack
    like: tuple[Tree, Tree]

    def before(self, params: Tree, state: Tree, batch: Batch, key: PRNGKeyArray) -> tuple[Hidden, tuple[PyTree, ...]]:
        """The input of the first layer, and the further arguments of every layer."""

        def reached(x: Hidden, *args: PyTree) -> Hidden:
            frame = current()
            if shared := [*frame.shared]:
                self._refuse(f"the layers before it share {', '.join(map(repr, shared))} with it")
            while frame.parent is not None:
                frame = frame.parent
                if not frame.names and frame.parent is not None:
                    self._refuse("a transform such as remat surrounds it")
            raise _Reached(x, args)

        model = self._with_replaced_stack(params, state, reached)
        before = jax.tree.leaves(split(model)[2])
        try:
            invoke(model, batch, key=key, training=True, method=self.objective)
        except _Reached as found:
            after = jax.tree.leaves(split(model)[2])
            if any(new is not old for new, old in zip(after, before, strict=True)):
                self._refuse("a layer before it writes Variables")
            if any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(found.args_of_layers)):
                self._refuse("its layers take further floating-point arguments, which may depend on parameters")
            return found.x, found.args_of_layers
        raise ConfigError(f"the objective does not run {self.stack.path}, which the pipeline divides into stages")

    def layer(
        self,
        params: Tree,
        state: Tree,
        x: Hidden,
        args: tuple[PyTree, ...],
        index: Int[Array, ""],
        key: PRNGKeyArray,
    ) -> tuple[Hidden, Tree, Collections]:
        """(output, new state, reports) of one layer with the parameters `params` and the other Variables `state`."""
        layer: Any = nnx.merge(self._graphdef, params, state)
        names = tuple(self.stack.path.split("."))
        place: tuple[str | jax.Array, ...] = (*self.stack.place.split("."), index)
        with root(None, key=key, training=True, names=names) as stack, inside(stack, layer, place) as frame:
            try:
                y = layer(x, *args)
            except ContextError as error:
                error.add_note(f"in a pipeline, layers of {self.stack.path} cannot read values that other layers share")
                raise
        check_no_tracers(layer)
        assert frame.collections is not None
        return y, nnx.to_pure_dict(split(layer)[2]), frame.collections

    def after(
        self, params: Tree, state: Tree, batch: Batch, key: PRNGKeyArray, y: Hidden
    ) -> tuple[LossSum, Collections, Tree]:
        """(result of the objective, reports, new state), given the output of the last layer."""
        calls: list[Hidden] = []

        def given(x: Hidden, *args: PyTree) -> Hidden:
            calls.append(x)
            return y

        model = self._with_replaced_stack(params, state, given)
        loss, collections = invoke(model, batch, key=key, training=True, method=self.objective)
        if len(calls) != 1:
            self._refuse(f"the model runs it {len(calls)} times")
        check_no_tracers(model)
        return loss, collections, nnx.to_pure_dict(split(model)[2])

    @functools.cached_property
    def _graphdef(self) -> nnx.GraphDef[nnx.Module]:
        """The structure of the layers."""
        return split(_at(self.fn.bind(*self.like), self.stack.names))[0]

    def _with_replaced_stack(self, params: Tree, state: Tree, run: Callable[..., Hidden]) -> Any:  # Any: a module
        """The model with `run` in place of the stack."""
        layers = (self.stack.divided(each)[0] for each in self.like)
        whole = (self.stack.whole(like, rest) for like, rest in zip(layers, (params, state), strict=True))
        model = self.fn.bind(*whole)
        *above, name = self.stack.path.split(".")
        replacement = _Replacement.Config().build(rngs=Rngs(0))
        replacement.run = run
        holder = _at(model, tuple(int(each) if each.isdigit() else each for each in above))
        if isinstance(holder, nnx.List):
            holder[int(name)] = replacement
        else:
            setattr(holder, name, replacement)
        return model

    def _refuse(self, reason: str) -> None:
        raise ConfigError(f"{self.stack.path} cannot be divided into pipeline stages: {reason}")


def _at(module: Any, names: tuple[str | int, ...]) -> Any:  # Any: a module or a list of modules
    return functools.reduce(
        lambda node, name: node[name] if isinstance(name, int) else getattr(node, name), names, module
    )
