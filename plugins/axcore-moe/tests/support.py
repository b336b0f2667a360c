"""A small mixture of experts with parameters from NumPy, and its reference in NumPy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from axcore.module import abstract
from axcore.nn import FeedForward
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE

DIM, HIDDEN = 4, 3


def mixture(num_experts=4, **fields):
    block = FeedForward.Config(hidden_dim=HIDDEN)
    cfg = MoE.Config(input_dim=DIM, num_experts=num_experts, experts=Experts.Config(block=block))
    return cfg.set(**fields)


def tokens(count, rows=1, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, count, DIM)).astype(np.float32)


def parameters(cfg, seed=0, scale=0.7):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (scale * random.normal(size=leaf.shape)).astype(leaf.dtype), shapes(cfg)[1])


shapes = functools.cache(abstract)


@functools.cache
def compiled(cfg, training):
    fn = shapes(cfg)[0]
    return jax.jit(lambda params, state, x, key: fn(params, state, x, key=key, training=training))


def call(cfg, params, x, state=None, *, training=False, seed=0):
    """(output, collections, new state) of one call."""
    if state is None:  # all start at zero
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes(cfg)[2])
    (out, collections), new = compiled(cfg, training)(params, state, x, jax.random.key(seed))
    return np.asarray(out), collections, new


def to_first(params):
    """These parameters with a router that gives equal scores: ties go to the first experts."""
    router = params["router"]["linear"]
    return {**params, "router": {"linear": {**router, "weight": jnp.zeros_like(router["weight"])}}}


def expected(params, x, top_k):
    """The reference: for each token, the sum of the `top_k` most probable experts, weighted by their softmax."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    flat = np.asarray(x, np.float64).reshape(-1, DIM)
    out = np.zeros_like(flat)
    for i, token in enumerate(flat):
        logits = token @ wide["router"]["linear"]["weight"]
        chosen = np.argsort(-logits, kind="stable")[:top_k]
        weights = np.exp(logits[chosen] - logits[chosen].max())
        for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
            gate, up = (token @ wide["experts"][name]["weight"][expert] for name in ("gate", "up"))
            out[i] += weight * ((gate / (1 + np.exp(-gate)) * up) @ wide["experts"]["down"]["weight"][expert])
    return out.reshape(x.shape)
