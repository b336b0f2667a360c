"""Runs a training step with Muon on one and on eight CPU devices and prints the results as JSON."""

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

from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.parallel import Mesh
from axcore.train import Learner, WarmupStableDecay
from axcore.train.step.program import program
from axcore_muon.optimizer import Muon

MESHES = {"one": {"data": 1, "fsdp": 1}, "data=2, fsdp=4": {"data": 2, "fsdp": 4}}
LAYER = TransformerLayer.Config(
    attention=Attention.Config(num_heads=2, num_kv_heads=1), ffn=FeedForward.Config(hidden_dim=12)
)
MODEL = CausalLM.Config(vocab_size=11, dim=8, decoder=Repeat.Config(num_layers=2, layers=LAYER))
LEARNER = Learner.Config(optimizer=Muon.Config(dtype="float32"), schedule=WarmupStableDecay(peak=0.1, warmup_steps=1))


def batch(rows=8, seq=4):
    ids = np.random.default_rng(3).integers(0, 11, (rows, seq + 1)).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((rows, seq), np.float32)}


def one_step(shape):
    devices = jax.devices()[: shape["data"] * shape["fsdp"]]
    made = program(MODEL, LEARNER, Mesh(shape=shape).make(devices))
    state, step = made.init(jnp.uint32(5)), made.compile_train(batch())
    shardings = jax.tree.map(lambda leaf: leaf.sharding, made.batch_shapes(batch()))
    start = jax.device_get(state.params)
    state, _ = step(state, jax.device_put(batch(), shardings))
    updates = jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, start)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): {
            "values": np.asarray(leaf).tolist(),
            "shape": leaf.shape,
            "shard": leaf.addressable_shards[0].data.shape,
        }
        for path, leaf in jax.tree.leaves_with_path((state.params, state.optimizer))
    }
    by_path = jax.tree.leaves_with_path(updates)
    return found, {jax.tree_util.keystr(path): leaf.tolist() for path, leaf in by_path}


if __name__ == "__main__":
    print(json.dumps({name: one_step(shape) for name, shape in MESHES.items()}))
