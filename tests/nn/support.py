"""Running layers on parameters that NumPy made: no eager initialisation, one compilation for each config and shape."""

import functools

import jax
import numpy as np

from axcore.module import abstract

shapes = functools.cache(abstract)


def parameters(cfg, seed=0, scale=0.5):
    """Random parameters in the form that `cfg` wants."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (scale * random.normal(size=leaf.shape)).astype(leaf.dtype), shapes(cfg)[1])


@functools.cache
def compiled(cfg, method="__call__"):
    fn, _, state = shapes(cfg)
    assert not jax.tree.leaves(state)
    return jax.jit(lambda params, args: fn(params, {}, *args, method=method)[0])


def call(cfg, params, *args, method="__call__"):
    """(output, collections) of a compiled call, on the host."""
    return jax.device_get(compiled(cfg, method)(params, args))


def wide(params):
    """Parameters in float64, for a reference."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def layer_of(params, index):
    return jax.tree.map(lambda leaf: leaf[index], params)
