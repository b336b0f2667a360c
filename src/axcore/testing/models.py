"""Small models to attach things to, and what a training step of them computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore.module import Rngs, functional
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.train import CrossEntropy

VOCAB_SIZE = 32
OBJECTIVE = CrossEntropy.Config(z_loss=1e-3)
Batch = dict[str, jax.Array]


def tiny_model() -> CausalLM.Config:
    """A causal language model that holds one of everything that features attach to."""
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=4, num_kv_heads=2), ffn=FeedForward.Config(hidden_dim=24)
    )
    return CausalLM.Config(vocab_size=VOCAB_SIZE, dim=16, decoder=Repeat.Config(num_layers=2, layers=layer))


def tiny_batch(rows: int = 2, seq: int = 8) -> Batch:
    """Random tokens: `inputs`, `targets` and `weights` [rows, seq]."""
    ids = jax.random.randint(jax.random.key(1), (rows, seq + 1), 0, VOCAB_SIZE)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": jnp.ones((rows, seq))}


def objective(fn: Any, params: Any, state: Any, batch: Batch, *, key: jax.Array | None = None) -> jax.Array:
    """What a training step minimizes: the loss and what layers add to it."""
    key = jax.random.key(2) if key is None else key
    return OBJECTIVE.build().value(fn, params, state, batch, key=key, training=True)


@functools.cache  # several checks look at the same model
def loss_and_grads(cfg: Any, make_batch: Callable[[], Batch]) -> tuple[np.ndarray, Any]:
    """Loss and gradients of a freshly built model."""
    fn, params, state = functional(cfg.build(rngs=Rngs(0)))
    step = jax.jit(jax.value_and_grad(lambda params, batch: objective(fn, params, state, batch)))
    loss, grads = step(params, make_batch())
    return np.asarray(loss), jax.device_get(grads)


def by_path(tree: Any) -> dict[str, Any]:
    """Leaves by their path, as in `decoder.layers.attention.query.weight`."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
