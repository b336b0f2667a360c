"""Two training steps with delayed scaling on several devices, for a process with eight devices."""

import math

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.parallel import ByTag, Mesh
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.models import by_path
from axcore.train import CrossEntropy, Learner
from axcore.train.step.program import program

from .support import scanned

MESHES = {
    "microbatches": ({"data": 1}, 4, ()),
    "remat": ({"data": 1}, 1, ()),
    "data": ({"data": 4}, 1, ()),
    "fsdp": ({"fsdp": 8}, 1, ()),
    "pipeline": ({"pipeline": 2, "data": 2}, 4, ()),
    "experts": ({"data": 2, "expert": 2}, 1, ("moe",)),
}
"""name -> (mesh, microbatches, features)."""


def model(features=()):
    cfg = tiny_model()
    cfg = cfg.set(decoder=cfg.decoder.set(num_layers=6))
    for feature in features:
        cfg = ax.use(feature, num_experts=4)(cfg)
    return ax.use("fp8", scaling="delayed", amax_history_len=3)(cfg)


def states(cfg, mesh, microbatches):
    """path -> state after two steps."""
    layout = Mesh(shape=mesh).make(jax.devices()[: math.prod(mesh.values())])
    made = program(cfg, Learner.Config(), layout, CrossEntropy.Config(), microbatches)
    batch = tiny_batch(8, 8)
    state, data = made.init(jnp.uint32(0)), jax.tree.map(lambda leaf: leaf.sharding, made.batch_shapes(batch))
    data = jax.device_put(dict(batch), data)
    step = made.compile_train(batch)
    for _ in range(2):
        state, _ = step(state, data)
    return by_path(jax.device_get(state.model_state))


def both(name):
    """The state with the mesh of this name, and on one device with the whole batch."""
    mesh, microbatches, features = MESHES[name]
    cfg = model(features)
    other = scanned(cfg, ByTag(save=("fp8_input",))) if name == "remat" else cfg
    return states(other, mesh, microbatches), states(cfg, {"data": 1}, 1)
