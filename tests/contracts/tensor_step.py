"""Compiled training steps on eight CPU devices; `axcore.testing.devices.on_devices` runs `main`."""

import math
import re

import jax
import numpy as np

from axcore.config import ConfigError
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.parallel import Mesh
from axcore.testing.models import OBJECTIVE, by_path
from axcore.train import Learner
from axcore.train.step.program import program

RULES = {"head": "tensor", "kv_head": "tensor", "mlp": "tensor", "vocab": "tensor"}
HEADS, HEAD_DIM, HIDDEN, VOCAB, DIM, ROWS, SEQ = 8, 3, 40, 56, 10, 2, 16
LAYER = TransformerLayer.Config(
    attention=Attention.Config(num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM),
    ffn=FeedForward.Config(hidden_dim=HIDDEN),
)
MODEL = CausalLM.Config(vocab_size=VOCAB, dim=DIM, decoder=Repeat.Config(num_layers=2, layers=LAYER))


def batch(rows=ROWS, seq=SEQ):
    ids = np.random.default_rng(0).integers(0, VOCAB, (rows, seq)).astype(np.int32)
    return {"inputs": ids, "targets": ids, "weights": np.ones((rows, seq), np.float32)}


def compiled(rules):
    """{path: (logical axes, number of shards on entry, number of shards on exit)} of the state, and every array shape
    in the program of one device."""
    made = program(MODEL, Learner.Config(), Mesh(shape={"tensor": 8}, rules=rules).make(), OBJECTIVE)
    step = made.compile_train(batch())
    leaves, entry = by_path(made.state), by_path(step.input_shardings[0][0])
    leaving = by_path(step.output_shardings[0])
    axes = {path: names for path, names in flat(made.fn.axes).items()}

    def parts(path, shardings):
        shape = leaves[path].shape
        return math.prod(shape) // math.prod(shardings[path].shard_shape(shape))

    def names(path):  # a moment has the axes of its parameter
        return next((axes[name] for name in axes if path.endswith(f".{name}") and leaves[path].ndim), ())

    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"\b[a-z]+[0-9]+\[([0-9,]+)\]", step.as_text())}
    return {path: (names(path), parts(path, entry), parts(path, leaving)) for path in leaves}, shapes


def flat(axes):
    leaves = jax.tree.leaves_with_path(axes, is_leaf=lambda node: isinstance(node, tuple))
    return {jax.tree_util.keystr(path, simple=True, separator="."): names for path, names in leaves}


def entering():
    """The shard shapes of a batch with sharded rows and tokens, and the errors for batches that do not divide."""
    made = program(MODEL, Learner.Config(), SPLIT.make())
    told = []
    for shape in ((ROWS, SEQ + 1), (ROWS + 1, SEQ)):
        try:
            made.batch_shapes(batch(*shape))
        except ConfigError as error:
            told.append(str(error))
    return {each.sharding.shard_shape(each.shape) for each in made.batch_shapes(batch()).values()}, told


SPLIT = Mesh(shape={"data": 2, "context": 4}, rules={"batch": "data", "seq": "context"})


def main():
    found = {"all": compiled(RULES), "entering": entering(), "none": compiled({})[1]}
    found["no kv_head"] = compiled({name: axis for name, axis in RULES.items() if name != "kv_head"})[1]
    return found
