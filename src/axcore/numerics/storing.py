"""Converts a trained model to stored weights, such as codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
from flax import nnx

from axcore.config import AxcoreError, Config, ConfigError, select, walk
from axcore.module import Tree, abstract
from axcore.numerics.base import Numerics


class StoredModel(NamedTuple):
    """The config of a model with stored weights, and its parameters."""

    cfg: Config
    params: Tree


def stored(cfg: Config, params: Tree) -> StoredModel:
    """Sets `stored=True` for all numerics that have a stored representation and encodes their weights.

    Weights are encoded one at a time; other parameters are returned unchanged. The function can be jitted over
    `params`. Biases, adapters and state keep their paths. Encoded arrays are below the path of the weight, as in
    `...query.weight.codes`.

    Args:
        cfg: config of a model that was trained with the numerics, or of a float model that `use` added them to.
        params: parameters of that model; layers may be stacked.

    Raises:
        ConfigError: no numerics in the config can be converted, because none has a stored representation or all are
            already stored.
        AxcoreError: the parameters do not match the config.
    """
    chosen = {path for path, node in walk(cfg) if _can_store(node)}
    if not chosen:
        raise ConfigError(
            "no numerics in the config can be converted to stored weights. Add numerics with a stored representation, "
            "such as int8 or fp8"
        )
    fn, shapes, state = abstract(cfg)
    for path, module in nnx.iter_modules(fn.bind(shapes, state)):
        numerics = getattr(module, "numerics", None)
        if isinstance(numerics, Numerics) and _can_store(numerics.config):
            params = _encoded(params, path, numerics, path)
    return StoredModel(select(cfg, lambda path, _: path in chosen).set(stored=True), params)


def _can_store(node: Config) -> bool:
    if not isinstance(node, Numerics.Config) or node.stored:
        return False
    return node.target is not None and node.target.encode is not Numerics.encode


def _encoded(params: Tree, rest: tuple[Any, ...], numerics: Numerics, path: tuple[Hashable, ...]) -> Tree:
    """A copy of `params` with the weight at the path `rest` encoded."""
    if rest:
        below = params.get(rest[0])
        if not isinstance(below, dict):
            raise AxcoreError(
                f"the parameters have no entry at {_dotted(path)}; pass the parameters of a model with this config"
            )
        return {**params, rest[0]: _encoded(below, rest[1:], numerics, path)}
    weight = params.get("weight")
    shape = numerics.config.shape
    if weight is None or isinstance(weight, dict) or weight.shape[weight.ndim - len(shape) :] != shape:
        found = getattr(weight, "shape", "none")
        raise AxcoreError(
            f"{_dotted(path)}.weight must be a float array whose shape ends in {shape}, got shape {found}"
        )
    encode: Callable[[jax.Array], dict[str, jax.Array]] = numerics.encode
    for _ in range(weight.ndim - len(shape)):  # stacked layers
        encode = jax.vmap(encode)
    return {**params, "weight": jax.jit(encode)(weight)}


def _dotted(path: tuple[Hashable, ...]) -> str:
    return ".".join(map(str, path)) or "the root"
