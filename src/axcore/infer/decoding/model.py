"""The model of a decoder: what its config and its arrays tell, and its initial state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PRNGKeyArray

from axcore.config import Config, ConfigError, allocating, walk
from axcore.module import DecodingState, Functional, Layer, Rngs, Tree, functional
from axcore.nn import KVCache, Paging, Windowed
from axcore.parallel import Layout


def paging_of(cfg: Config) -> Paging | None:
    """The pool of pages in a config for decoding.

    Raises:
        ConfigError: two layers differ.
    """
    kinds = KVCache.Config, Windowed.Config
    found = [(path, node.paging) for path, node in walk(cfg) if isinstance(node, kinds) and node.paging]
    if not found:
        return None
    first, wanted = found[0]
    for path, paging in found:
        if paging != wanted:
            raise ConfigError(
                f"{path} has {paging}, but {first} has {wanted}. Layers share page tables: set equal values"
            )
    return wanted


def state_axes(fn: Functional) -> Tree:
    """The logical axes of the state."""
    return {"lengths": ("batch",), "model": fn.state_axes}


def state_shardings(layout: Layout, state: Tree, axes: Tree) -> Tree:
    """The sharding of each array of the decoding state. Rows and kv heads are replicated if their number is not a
    multiple of the number of devices, as in a decoder of one row or with few kv heads.

    Args:
        layout: the mesh and rules.
        state: the arrays or their shapes.
        axes: the logical axes of each array.
    """

    def fitting(array: jax.Array | jax.ShapeDtypeStruct, names: tuple[str | None, ...]) -> tuple[str | None, ...]:
        pairs = zip(names, array.shape, layout.spec(names), strict=True)
        return tuple(
            None if name in ("batch", "kv_head") and size % layout.size_of(at) else name for name, size, at in pairs
        )

    return layout.shardings(state, jax.tree.map(fitting, state, axes))


def empty_state(cfg: Config, name: str, batch_size: int, layout: Layout | None) -> tuple[Functional, Tree, Tree]:
    """The decoding model, the logical axes of its state, and the initial state with the shardings of the layout.

    Args:
        cfg: the config for decoding.
        name: the name of the model, for errors.
        batch_size: the number of slots.

    Raises:
        ConfigError: no layer has decoding state.
        OutOfMemory: the state does not fit in memory.
    """
    built: list[Functional] = []

    def empty(key: PRNGKeyArray) -> Tree:  # XLA removes the parameters, since they are not returned
        module = cfg.build(rngs=Rngs(key))
        if not any(isinstance(node, DecodingState) for _, node in nnx.iter_graph(module)):
            raise ConfigError(
                f"no layer of {name} has decoding state: add a KV cache, or a config with a method for_decoding, such "
                f"as Attention.Config"
            )
        fn, _, state = functional(module)
        built.append(fn)
        return {"lengths": jnp.zeros((batch_size,), jnp.int32), "model": state}

    key = jax.random.key(0)
    advice = "Reduce max_rows and max_len of the engine, or num_pages of paged caches"
    with allocating(f"the KV caches and other decoding state of {batch_size} rows", advice):
        if layout is None:
            state = jax.jit(empty)(key)
            return built[0], state_axes(built[0]), state
        shapes = jax.eval_shape(empty, key)
        axes = state_axes(built[0])
        return built[0], axes, jax.jit(empty, out_shardings=state_shardings(layout, shapes, axes))(key)


def pruned(wanted: Tree, params: Tree) -> Tree:
    """The parameters that the decoding model has."""
    return {
        name: pruned(below, params[name]) if isinstance(below, dict) else params[name] for name, below in wanted.items()
    }


def merged(fresh: Tree, held: Tree) -> Tree:
    """The state of the decoding model, with the values of the trained model at paths that both have."""
    return {
        name: merged(value, held.get(name, {})) if isinstance(value, dict) else held.get(name, value)
        for name, value in fresh.items()
    }


def layers_with_state(model: nnx.Module) -> dict[str, tuple[Layer, list[DecodingState]]]:
    """The layers of a model that keep decoding state, and that state, by path."""
    found = {}
    for path, each in nnx.iter_modules(model):
        states = [value for value in vars(each).values() if isinstance(value, DecodingState)]
        if states and isinstance(each, Layer):
            found[".".join(map(str, ("model", *path)))] = (each, states)
    return found


def is_paged(state: DecodingState) -> bool:
    """Whether an array of the decoding state is in pages."""
    return "page" in state.get_metadata()["axes"]
