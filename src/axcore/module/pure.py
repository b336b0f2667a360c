"""Calling a module with a context, and as a pure function of arrays."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axcore.config import Config, under
from axcore.module.collections import Collections
from axcore.module.context import ContextError, root
from axcore.module.rngs import Rngs
from axcore.module.variables import GradientState

Tree = dict[str, Any]
"""A nested dict of arrays (or of their shapes, or axes), keyed by attribute name."""


def invoke(
    module: nnx.Module,
    *args: Any,
    key: jax.Array | None = None,
    training: bool = False,
    method: str | Callable[..., Any] = "__call__",
    capture: Sequence[str] = (),
    **kwargs: Any,
) -> tuple[Any, Collections]:
    """Calls `module.method(*args, **kwargs)`, or the function `method(module, *args, **kwargs)`, in a fresh context.

    Args:
        key: where the layers' PRNG streams start; without it a layer that draws is an error.
        training: what the layers see as `self.training`.
        capture: path patterns of values to hand out, as in `**.attention.logits`; see `Layer.add_output`. A layer's own
            path stands for what the layer returns.

    Returns:
        The result, and what the layers reported on the way.
    """
    with root(module, key=key, training=training, captured=tuple(capture)) as frame:
        call = getattr(module, method) if isinstance(method, str) else functools.partial(method, module)
        output = call(*args, **kwargs)
    assert frame.collections is not None
    return output, frame.collections


@dataclasses.dataclass(frozen=True, eq=False)
class Functional:
    """A module without its arrays: pure, hashable by identity, cheap to close over in `jax.jit`.

    ```python
    fn, params, state = axcore.functional(model)
    (logits, collections), state = fn(params, state, ids, key=key, training=True)
    ```
    """

    graphdef: nnx.GraphDef[Any]
    axes: Tree
    """The logical axes of each parameter, as tuples, in the form of `params`."""
    state_axes: Tree
    """Those of the other Variables, in the form of `state`."""
    gradient_state: Tree
    """Whether each of those is a `GradientState`, in the form of `state`."""
    activation_axes: frozenset[str] = frozenset()
    """Those that layers declare because no Variable has them; see `Layer.activation_axes`."""

    @property
    def logical_axes(self) -> frozenset[str]:
        """Every name of a dimension that mesh rules may map."""
        leaves = jax.tree.leaves([self.axes, self.state_axes], is_leaf=lambda node: isinstance(node, tuple))
        return self.activation_axes.union(name for axes in leaves for name in axes if name is not None)

    def bind(self, params: Tree, state: Tree) -> Any:
        """The module, holding these arrays."""
        return nnx.merge(self.graphdef, params, state)

    def __call__(self, params: Tree, state: Tree, *args: Any, **kwargs: Any) -> tuple[tuple[Any, Collections], Tree]:
        """Calls the module; arguments are those of `invoke`. Returns ((output, collections), new state)."""
        module = self.bind(params, state)
        result = invoke(module, *args, **kwargs)
        _refuse_escaped(module)
        return result, nnx.to_pure_dict(split(module)[2])


def split(module: nnx.Module) -> tuple[Any, Any, Any]:
    """(graph definition, state of the parameters, state of all other Variables)."""
    graphdef, params, *rest = nnx.split(module, nnx.Param, ...)
    return graphdef, params, rest[0]


def functional(module: nnx.Module) -> tuple[Functional, Tree, Tree]:
    """A module as (pure function, parameters, other state)."""
    _refuse_shared(module)
    graphdef, params, state = split(module)
    declared = (getattr(node, "activation_axes", ()) for _, node in nnx.iter_modules(module))
    fn = Functional(
        graphdef,
        _map(axes_of, params),
        _map(axes_of, state),
        _map(lambda each: isinstance(each, GradientState), state),
        frozenset(itertools.chain.from_iterable(declared)),
    )
    return fn, nnx.to_pure_dict(params), nnx.to_pure_dict(state)


def abstract(cfg: Config, path: str = "") -> tuple[Functional, Tree, Tree]:
    """`functional(cfg.build(...))` with shapes in place of arrays: no memory is taken and nothing is computed.

    Args:
        path: where `cfg` stands in a larger config; errors begin with it.
    """
    found: list[Functional] = []

    def make(key: jax.Array) -> tuple[Tree, Tree]:
        with under(path):
            fn, params, state = functional(cfg.build(rngs=Rngs(key, path)))
        found.append(fn)
        return params, state

    params, state = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
    return found[0], params, state


def initializer(cfg: Config) -> Callable[[jax.Array], tuple[Tree, Tree]]:
    """A pure function key -> (parameters, other state); jit it with output shardings to build a model in place."""

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        return functional(cfg.build(rngs=Rngs(key)))[1:]

    return init


def _refuse_escaped(module: nnx.Module) -> None:
    """A traced value that a layer kept as a plain attribute would be lost without a word, or fail far from here."""
    for path, node in nnx.iter_modules(module):
        for name, value in vars(node).items():
            if isinstance(value, jax.core.Tracer):
                where = ".".join(map(str, path)) or "the module"
                raise ContextError(
                    f"{where} ({type(node).__name__}) keeps a traced value in its attribute {name!r}; return it, "
                    f"report it with add_output, or hold it in an nnx.Variable"
                )


def _refuse_shared(module: nnx.Module) -> None:
    """Two paths to one module or Variable would be trained as one and saved as two."""
    for paths in nnx.find_duplicates(module, only=lambda _, node: isinstance(node, nnx.Variable | nnx.Module)):
        first, second = (".".join(map(str, path)) or "the module" for path in paths[:2])
        node = functools.reduce(_step, paths[0], module)
        raise ContextError(
            f"{first} and {second} are one {type(node).__name__}; a module has one place (to tie weights, call one "
            f"module from both places)"
        )


def _step(node: Any, name: Any) -> Any:
    return node[name] if isinstance(name, int) else vars(node)[name]


def axes_of(variable: nnx.Variable[Any]) -> tuple[str | None, ...]:
    """The logical axes of a Variable's value. In the body of a scan they are those that the scan has left of it."""
    ndim = jnp.ndim(variable.get_raw_value())
    axes = variable.get_metadata().get("axes") or (None,) * ndim
    return tuple(axes[len(axes) - ndim :])


def _map(fn: Callable[[nnx.Variable[Any]], Any], state: Any) -> Tree:
    """A function of each Variable, in the form of its values."""
    tree: Tree = nnx.to_pure_dict(jax.tree.map(fn, state, is_leaf=lambda node: isinstance(node, nnx.Variable)))
    return tree
