"""Small models and batches for tests, and their losses and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from axcore.config import Config, has_field
from axcore.config.tree import transform
from axcore.module import DTypes, Functional, Rngs, Tree, functional
from axcore.nn import Attention, CausalLM, FeedForward, Normal, Repeat, SlidingWindow, TransformerLayer
from axcore.train import CrossEntropy, Objective

VOCAB_SIZE = 32
OBJECTIVE = CrossEntropy.Config(z_loss=1e-3)
Batch = dict[str, jax.Array]


def tiny_model() -> CausalLM.Config:
    """A causal language model with one node of each kind that features attach to."""
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=4, num_kv_heads=2), ffn=FeedForward.Config(hidden_dim=24)
    )
    return CausalLM.Config(vocab_size=VOCAB_SIZE, dim=16, decoder=Repeat.Config(num_layers=2, layers=layer))


_SIZES = {
    **{"vocab_size": 48, "dim": 32, "hidden_dim": 24, "num_layers": 1, "num_experts": 8, "top_k": 4},
    **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8, "absorb_up_to": 4},
    **{"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
}


def shrunk[C: Config](cfg: C) -> C:
    """A model of the same structure in float32, with the sizes of a test. Windows have at most 6 tokens, a `Repeat`
    has one layer or group, and weights are large enough for logits that differ."""

    def small(_: str, node: Config) -> Config:
        found = {name: getattr(node, name) for name in _SIZES if has_field(node, name)}
        values = {name: min(value, _SIZES[name]) for name, value in found.items() if isinstance(value, int)}
        if isinstance(node, Normal):
            return node.set(stddev=0.2)
        if isinstance(node, SlidingWindow):
            return node.set(size=min(node.size, 6))
        if has_field(node, "dtypes"):
            return node.set(**values, dtypes=DTypes() if getattr(node, "dtypes", None) is not None else None)
        return node.set(**values) if values else node

    small_cfg: C = transform(cfg, small)
    return small_cfg


def tiny_batch(rows: int = 2, seq: int = 8) -> Batch:
    """Random tokens: the arrays `inputs`, `targets` and `weights`, each [rows, seq]."""
    ids = jax.random.randint(jax.random.key(1), (rows, seq + 1), 0, VOCAB_SIZE)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": jnp.ones((rows, seq))}


def objective(
    fn: Functional, params: Tree, state: Tree, batch: Batch, *, key: PRNGKeyArray | None = None
) -> Float[Array, ""]:
    """The loss that a training step minimizes, including the losses that layers add."""
    key = jax.random.key(2) if key is None else key
    built: Objective = OBJECTIVE.build()
    return built.value(fn, params, state, batch, key=key, training=True)


@functools.cache  # several checks use the same model
def loss_and_grads(cfg: Config, make_batch: Callable[[], Batch]) -> tuple[np.ndarray, Tree]:
    """Loss and gradients of a freshly built model."""
    fn, params, state = functional(cfg.build(rngs=Rngs(0)))
    step = jax.jit(jax.value_and_grad(lambda params, batch: objective(fn, params, state, batch)))
    loss, grads = step(params, make_batch())
    return np.asarray(loss), jax.device_get(grads)


def by_path(tree: PyTree) -> Tree:
    """The leaves of a pytree by path, such as `decoder.layers.attention.query.weight`."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def without_axes(params: PyTree, axes: Tree) -> list[str]:
    """Paths of the parameters with two or more dimensions, the layers of a stack aside, and no logical axes.

    Args:
        params: arrays or shapes.
        axes: the logical axes of each parameter, as in `Functional.axes`.
    """
    names = jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple))
    own = {path: [name for name in each if name != "layer"] for path, each in zip(by_path(params), names, strict=True)}
    return [path for path, each in own.items() if len(each) > 1 and not any(each)]
