"""Initializes mixtures of experts from a dense model."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import axcore as ax
from axcore.config import under
from axcore.config.tree import join
from axcore.module import abstract
from axcore.train import Initial
from axcore.train.checkpoint.initial import Model
from axcore.train.checkpoint.model_folder import Forms, flat
from axcore_moe.layer import MoE


class Upcycled(Initial):
    """The weights of a dense model, with each feed-forward block copied into the experts that replace it (Komatsuzaki
    et al. 2022, arXiv 2212.05055). Routers are newly initialized. Without noise, the model computes the same function
    as the dense model, except for tokens that its dispatch drops."""

    class Config(Initial.Config):
        source: Initial.Config = ax.REQUIRED
        """Source of the dense weights. It loads the model as it would be without mixtures."""
        noise: ax.NonNegativeFloat = 0.0
        """Standard deviation of the noise that is added to make the experts differ, relative to the standard deviation
        of each expert's array."""
        seed: ax.Seed = 0
        """Seed of the noise."""
        allow_new: tuple[str, ...] = ("**.router.**",)

    config: Config

    def __init__(self, cfg: Config):
        super().__init__(cfg)

    def load(self, model: Model, params: Forms, state: Forms) -> dict[str, jax.Array]:
        """See `Initial.load`.

        Raises:
            ConfigError: the model has no mixture, or a mixture is not equivalent to its block because it has a shared
                block or weights that do not sum to 1.
        """
        dense = ax.select(model, MoE).map(lambda _, mixture: block_of(mixture))
        dense_params, dense_state = (flat(tree) for tree in abstract(dense)[1:])
        experts = expert_paths(dense_params, params)
        wanted = {path: _one_expert(params[name], _rank(name)) for path, name in experts.items()}
        wanted |= {path: form for path, form in params.items() if path in dense_params}
        with under("source"):
            loaded = self.config.source.build().load(dense, wanted, {path: state[path] for path in dense_state})
        blocks = {path: loaded[path] for path in experts if path in loaded}
        others = {path: leaf for path, leaf in loaded.items() if path not in blocks}
        return others | upcycled(blocks, params, noise=self.config.noise, seed=self.config.seed)


def upcycled(
    dense: Mapping[str, jax.Array], params: Mapping[str, Any], *, noise: float = 0.0, seed: int = 0
) -> dict[str, jax.Array]:
    """Copies the feed-forward blocks of a dense model into experts.

    Args:
        dense: arrays of the dense model by path. Its layers must be stacked like those of the model with mixtures.
        params: arrays, or shapes, dtypes and shardings, of the parameters of the model with mixtures, by path.
        noise, seed: see `Upcycled.Config`.

    Returns:
        The arrays of the experts' parameters by path, sharded as in `params`.
    """
    key, paths = jax.random.key(seed), sorted(expert_paths(dense, params).items())
    return {
        name: _copies(dense[path], params[name], _rank(name), noise, jax.random.fold_in(key, number))
        for number, (path, name) in enumerate(paths)
    }


def block_of(mixture: Any) -> Any:
    """The config of the feed-forward block that is equivalent to a mixture of its copies.

    Raises:
        ConfigError: no block is equivalent.
    """
    router = mixture.router
    if mixture.shared is not None:
        raise ax.ConfigError("a dense model has no weights for a shared block. Remove it (shared_experts=0).")
    if not getattr(router, "normalize", False) or router.scale != 1:
        raise ax.ConfigError(
            f"the weights of a token's experts must sum to 1, but those of router={router!r} do not. Use TopK with "
            f"normalize=True and scale=1.0."
        )
    return mixture.experts.block.set(input_dim=mixture.input_dim, dtypes=mixture.dtypes, tags=mixture.tags)


def expert_paths(dense: Iterable[str], params: Container[str]) -> dict[str, str]:
    """Maps paths in a dense model to paths of their copies: `ffn.up.weight` -> `ffn.experts.up.weight`. Omits paths
    whose copy is not in `params`."""
    found = {}
    for path in dense:
        owner, _, kind = path.rpartition(".")
        above, _, linear = owner.rpartition(".")
        name = join(above, f"experts.{linear}.{kind}")
        if name in params:
            found[path] = name
    return found


def _rank(name: str) -> int:
    """Number of dimensions of one expert's array, which follow the expert axis."""
    return 1 if name.endswith(".bias") else 2


def _copies(leaf: jax.Array, form: Any, rank: int, noise: float, key: jax.Array) -> jax.Array:
    def make(leaf: jax.Array) -> jax.Array:
        copies = jnp.broadcast_to(jnp.expand_dims(leaf, -rank - 1), form.shape)
        if not noise:
            return copies
        spread = noise * copies.std(axis=tuple(range(-rank, 0)), keepdims=True)
        return copies + spread * jax.random.normal(key, form.shape, form.dtype)

    return jax.jit(make, out_shardings=form.sharding)(leaf)


def _one_expert(experts: Any, rank: int) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of the array that `_copies` copies, sharded like the copies."""
    axis, sharding = len(experts.shape) - rank - 1, experts.sharding
    if isinstance(sharding, NamedSharding):
        spec = [*sharding.spec, *(None,) * (len(experts.shape) - len(sharding.spec))]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))
    shape = (*experts.shape[:axis], *experts.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, experts.dtype, sharding=sharding)
