"""Calls of a module in an invocation context, and modules as pure functions of arrays."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PRNGKeyArray, PyTree

from axcore.config import Config, under
from axcore.module.collections import Collections
from axcore.module.context import ContextError, root
from axcore.module.rngs import Rngs
from axcore.module.variables import GradientState

Tree = dict[str, Any]  # Any: the leaves may be arrays, shapes, axes or shardings
"""A nested dict keyed by attribute name, with an entry for each Variable of a module."""


def invoke(
    module: nnx.Module,
    *args: object,
    key: PRNGKeyArray | None = None,
    training: bool = False,
    method: str | Callable[..., PyTree] = "__call__",
    capture: Sequence[str] = (),
    shared: Mapping[str, PyTree] | None = None,
    **kwargs: object,
) -> tuple[PyTree, Collections]:
    """Calls `module.method(*args, **kwargs)`, or the function `method(module, *args, **kwargs)`, in a new context.

    Args:
        key: The key from which layers draw random numbers. Without a key, layers that draw raise an error.
        training: The value of `self.training` in the layers.
        capture: Path patterns of values to collect, as in `**.attention.logits`; see `Layer.add_output`. The path of
            a layer captures its result.
        shared: Values for all layers, as if an earlier layer had shared them; see `Layer.shared`.

    Returns:
        The result, and the reports of the layers.
    """
    with root(module, key=key, training=training, captured=tuple(capture), shared=shared) as frame:
        call = getattr(module, method) if isinstance(method, str) else functools.partial(method, module)
        output = call(*args, **kwargs)
    assert frame.collections is not None
    return output, frame.collections


@dataclasses.dataclass(frozen=True, eq=False)
class Functional:
    """A module without its arrays: a pure function, hashable by identity, that `jax.jit` may close over.

    ```python
    fn, params, state = axcore.functional(model)
    (logits, collections), state = fn(params, state, ids, key=key, training=True)
    ```
    """

    graphdef: nnx.GraphDef[nnx.Module]
    axes: Tree
    """The logical axes of each parameter, as tuples, in the structure of `params`."""
    state_axes: Tree
    """The logical axes of each other Variable, in the structure of `state`."""
    gradient_state: Tree
    """Whether each other Variable is a `GradientState`, in the structure of `state`."""
    activation_axes: frozenset[str] = frozenset()
    """The logical axes that layers declare in `Layer.activation_axes`."""

    @property
    def logical_axes(self) -> frozenset[str]:
        """The logical axes that mesh rules may map."""
        leaves = jax.tree.leaves([self.axes, self.state_axes], is_leaf=lambda node: isinstance(node, tuple))
        return self.activation_axes.union(name for axes in leaves for name in axes if name is not None)

    def bind(self, params: Tree, state: Tree) -> Any:  # Any: the class of the module
        """The module with these arrays."""
        return nnx.merge(self.graphdef, params, state)

    def __call__(
        self,
        params: Tree,
        state: Tree,
        *args: object,
        key: PRNGKeyArray | None = None,
        training: bool = False,
        method: str | Callable[..., PyTree] = "__call__",
        capture: Sequence[str] = (),
        shared: Mapping[str, PyTree] | None = None,
        **kwargs: object,
    ) -> tuple[tuple[PyTree, Collections], Tree]:
        """Calls the module as `invoke` does. Returns ((output, collections), new state)."""
        module = self.bind(params, state)
        result = invoke(
            module, *args, key=key, training=training, method=method, capture=capture, shared=shared, **kwargs
        )
        check_no_tracers(module)
        return result, nnx.to_pure_dict(split(module)[2])


def split(module: nnx.Module) -> tuple[nnx.GraphDef[nnx.Module], PyTree, PyTree]:
    """(graph definition, state of the parameters, state of all other Variables)."""
    graphdef, params, *rest = nnx.split(module, nnx.Param, ...)
    return graphdef, params, rest[0]


def functional(module: nnx.Module) -> tuple[Functional, Tree, Tree]:
    """A module as (pure function, parameters, other state).

    Raises:
        ContextError: A module or Variable has two paths, or an array is not in a Variable.
    """
    _check_unique(module)
    graphdef, params, state = split(module)
    _check_variables(module, state)
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
    """`functional(cfg.build(...))` with shapes in place of arrays. It computes nothing and allocates no arrays.

    Args:
        path: The path of `cfg` in a larger config, for error messages.
    """
    found: list[Functional] = []

    def make(key: jax.Array) -> tuple[Tree, Tree]:
        with under(path):
            fn, params, state = functional(cfg.build(rngs=Rngs(key, path)))
        found.append(fn)
        return params, state

    params, state = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
    return found[0], params, state


def initializer(cfg: Config) -> Callable[[PRNGKeyArray], tuple[Tree, Tree]]:
    """A pure function from key to (parameters, other state). Use `jax.jit` with `out_shardings` to initialize a sharded
    model in place."""

    def init(key: PRNGKeyArray) -> tuple[Tree, Tree]:
        return functional(cfg.build(rngs=Rngs(key)))[1:]

    return init


def check_no_tracers(module: nnx.Module) -> None:
    """Checks that no layer stores a traced value in a plain attribute, where it would be lost or fail later."""
    for path, node in nnx.iter_modules(module):
        for name, value in vars(node).items():
            if isinstance(value, jax.core.Tracer):
                where = ".".join(map(str, path)) or "the module"
                raise ContextError(
                    f"{where} ({type(node).__name__}) stores a traced value in its attribute {name!r}. Return it, "
                    f"report it with add_output, or store it in an nnx.Variable"
                )


def _check_unique(module: nnx.Module) -> None:
    """Checks that each module and Variable has one path. With two, it would be trained once and saved twice."""
    for paths in nnx.find_duplicates(module, only=lambda _, node: isinstance(node, nnx.Variable | nnx.Module)):
        first, second = (".".join(map(str, path)) or "the module" for path in paths[:2])
        node = functools.reduce(_step, paths[0], module)
        raise ContextError(
            f"{first} and {second} are the same {type(node).__name__}, but each module must have one path. To tie "
            f"weights, call one module from both places"
        )


def _check_variables(module: nnx.Module, state: PyTree) -> None:
    """Checks that no layer stores an array in a plain attribute, which is neither a parameter nor other state."""
    for path, value in nnx.to_flat_state(state):
        if not isinstance(value, nnx.Variable):
            *above, name = path
            where, node = ".".join(map(str, above)) or "the module", functools.reduce(_step, above, module)
            raise ContextError(
                f"{where} ({type(node).__name__}) stores an array in its attribute {name!r}. Compute a constant where "
                f"it is used, or store the array in an nnx.Variable"
            )


def _step(node: Any, name: object) -> Any:  # Any: a module, list or Variable
    return node[name] if isinstance(name, int) else vars(node)[str(name)]


def axes_of(variable: nnx.Variable[jax.Array]) -> tuple[str | None, ...]:
    """The logical axes of the value of a Variable. In the body of a scan they exclude the leading axis of the stack."""
    ndim = jnp.ndim(variable.get_raw_value())
    axes = variable.get_metadata().get("axes") or (None,) * ndim
    return tuple(axes[len(axes) - ndim :])


def _map(fn: Callable[[nnx.Variable[jax.Array]], object], state: PyTree) -> Tree:
    """Applies a function to each Variable of a state."""
    tree: Tree = nnx.to_pure_dict(jax.tree.map(fn, state, is_leaf=lambda node: isinstance(node, nnx.Variable)))
    return tree
