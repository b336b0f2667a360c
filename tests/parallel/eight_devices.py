"""Runs one training step on several meshes of eight CPU devices and prints the results as JSON.

`python -m tests.parallel.eight_devices`
"""

import json
import os

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axcore.module import abstract
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.parallel import Mesh
from axcore.train import CrossEntropy, Learner, Optimizer, Schedule
from axcore.train.step.program import program

from . import sharded

SHAPES = {
    "one": {"data": 1},
    "data=8": {"data": -1, "fsdp": 1},
    "fsdp=8": {"data": 1, "fsdp": -1},
    "data=2, fsdp=4": {"data": 2, "fsdp": 4},
}
RULES = {"one": {"batch": "data"}}
LAYER = TransformerLayer.Config(
    attention=Attention.Config(num_heads=2, num_kv_heads=1), ffn=FeedForward.Config(hidden_dim=12)
)
MODEL = CausalLM.Config(vocab_size=11, dim=8, decoder=Repeat.Config(num_layers=2, layers=LAYER))

OBJECTIVE = CrossEntropy.Config(z_loss=0.1)


class SGD(Optimizer):
    """An optimizer that subtracts the gradient: after one step, `old - new` is the gradient."""

    def transformation(self, axes):
        return optax.identity()


class ConstantRate(Schedule):
    rate: float = 1.0

    def __call__(self, step, total_steps):
        return jnp.full((), self.rate, jnp.float32)


LEARNER = Learner.Config(optimizer=SGD.Config(), schedule=ConstantRate(), clip_norm=None)


def batch(rows=8, seq=4):
    random = np.random.default_rng(3)
    ids = random.integers(0, 11, (rows, seq + 1))
    segments = np.cumsum(random.random((rows, seq)) < 0.3, axis=1)
    return {
        "inputs": ids[:, :-1].astype(np.int32),
        "targets": ids[:, 1:].astype(np.int32),
        "weights": (random.random((rows, seq)) * (random.random((rows, seq)) < 0.7)).astype(np.float32),
        "segment_ids": segments.astype(np.int32),
    }


def layout(name):
    mesh = Mesh(shape=SHAPES[name], rules=RULES[name]) if name in RULES else Mesh(shape=SHAPES[name])
    return mesh.make(jax.devices()[:1] if name == "one" else None)


def by_path(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def parameters(shapes):
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: (0.5 * random.normal(size=leaf.shape)).astype(leaf.dtype), shapes)


def reference_gradients():
    """The gradient of cross-entropy plus z-loss, by path."""
    fn, shapes, _ = abstract(MODEL)

    def objective(params):
        return OBJECTIVE.build().value(fn, params, {}, batch())

    gradient = jax.jit(jax.grad(objective))(parameters(shapes))
    return {path: np.asarray(leaf).tolist() for path, leaf in by_path(gradient).items()}


def one_step(name):
    built = program(MODEL, LEARNER, layout(name), OBJECTIVE)
    start = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), built.state)
    start.params = parameters(start.params)
    state, rows = jax.device_put(
        (start, batch()), jax.tree.map(lambda leaf: leaf.sharding, (built.state, built.batch_shapes(batch())))
    )
    new, metrics = built.compile_train(batch())(state, rows)
    old, new_params = by_path(start.params), by_path(new.params)
    return {
        "mesh": dict(built.layout.mesh.shape),
        "metrics": {key: float(value) for key, value in metrics.items()},
        "gradients": {path: (old[path] - np.asarray(new_params[path])).tolist() for path in old},
        "shapes": {path: leaf.shape for path, leaf in new_params.items()},
        "shards": {path: leaf.addressable_shards[0].data.shape for path, leaf in new_params.items()},
        "rows": rows["inputs"].addressable_shards[0].data.shape[0],
    }


def initial(name):
    """The initial parameters of a small model, and the shape of the shard of each on one device."""
    params = program(FeedForward.Config(input_dim=8, hidden_dim=3), LEARNER, layout(name)).init(jnp.uint32(5)).params
    return {
        path: [np.asarray(leaf).tolist(), leaf.addressable_shards[0].data.shape]
        for path, leaf in by_path(params).items()
    }


def error_of(run):
    try:
        run()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


if __name__ == "__main__":
    results = {name: one_step(name) for name in SHAPES}
    results["reference gradients"] = reference_gradients()
    results["initial"] = {name: initial(name) for name in ("one", "data=2, fsdp=4")}
    results["odd batch"] = error_of(lambda: program(MODEL, LEARNER, layout("data=8")).compile_train(batch(rows=6)))
    narrow = MODEL.set(dim=4)
    results["narrow model"] = error_of(lambda: program(narrow, LEARNER, layout("fsdp=8")))
    results["shard_map"] = sharded.results()
    print(json.dumps(results))
