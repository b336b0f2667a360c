"""Prints the results of a few steps of small models, in either mode of NNX. `python -m tests.module.tree_mode`"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axcore.module import abstract
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.train import CrossEntropy

from .layers import Plain, Stacked

LAYER = TransformerLayer.Config(attention=Attention.Config(num_heads=2), ffn=FeedForward.Config(hidden_dim=6))
MODEL = CausalLM.Config(vocab_size=7, dim=4, decoder=Repeat.Config(num_layers=2, layers=LAYER), head=None)
STACK = Stacked.Config(layer=Plain.Config(width=4, drop=True, summary=True, loss_weight=0.3, counts=True))
KEY = jax.random.key(0)
IDS = np.arange(6).reshape(1, 6)
BATCH = {"inputs": IDS, "targets": (IDS + 1) % 7, "weights": np.ones((1, 6), np.float32)}


def numbers(cfg, *args, **kwargs):
    """Value, summed gradients and summed new state of one compiled training call."""
    fn, params, state = abstract(cfg)
    params, state = (
        jax.tree.map(lambda leaf: np.cos(np.arange(leaf.size)).astype(leaf.dtype).reshape(leaf.shape), t)
        for t in (params, state)
    )

    def objective(params, state):
        (output, collections), new_state = fn(params, state, *args, key=KEY, training=True, **kwargs)
        return jnp.sum(output) + collections.total_loss(), new_state

    (value, new_state), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(params, state)
    return [float(value), *(sum(float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(t)) for t in (grads, new_state))]


def cross_entropy(model, batch):
    return CrossEntropy.Config(z_loss=0.1).build()(model, batch).mean()


def measure():
    return {"model": numbers(MODEL, BATCH, method=cross_entropy), "stack": numbers(STACK, np.ones((2, 4), np.float32))}


if __name__ == "__main__":
    modes = [nnx.set_graph_mode.current_value(), nnx.set_graph_updates.current_value()]
    print(json.dumps({"modes": modes, **measure()}))
