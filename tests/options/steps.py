"""Small training steps: learners, objectives and layouts. What is observed is the traced step, and where the arrays of
its state are. The meshes are abstract, so one device is enough."""

import jax
import jax.numpy as jnp
import optax

import axcore as ax
from axcore.config import Config
from axcore.nn import AllToAll, Repeat, RingAttention
from axcore.parallel import Mesh
from axcore.parallel.pipeline import GPipe, OneForwardOneBackward, ZeroBubble
from axcore.train import CrossEntropy, Learner, Trainer, WarmupCosine, WarmupStableDecay
from axcore.train.callbacks.group import Callbacks
from axcore.train.data import TextFiles, TextInput
from axcore.train.step.program import program
from axcore_callbacks.ema import EMA
from axcore_muon.optimizer import Muon

from .effects import Host
from .layers import ROWS, SEQ, layer, model, text


def trainer(**fields):
    """A trainer of a model with one layer."""
    text_input = TextInput.Config(source=TextFiles.Config(folder="unread"), seq_len=SEQ, batch_size=2 * ROWS)
    given = {"model": model(decoder=layer(input_dim=ax.REQUIRED)), "input": text_input, "steps": 10}
    return Trainer.Config(**given | fields)


def step(devices=1, platform="cpu"):
    """Observes a trainer on an abstract mesh."""

    def observe(cfg: Config):
        layout = cfg.mesh.abstract(devices, platform, "TPU v4")
        held = Callbacks(cfg.callbacks).on_device()
        built = program(cfg.model, cfg.learner, layout, cfg.objective, cfg.microbatches, held, cfg.compiler_options)
        ids = jax.ShapeDtypeStruct((cfg.input.batch_size, cfg.input.seq_len), jnp.int32)
        batch = {"inputs": ids, "targets": ids, "weights": jax.ShapeDtypeStruct(ids.shape, jnp.float32)}
        jaxpr, shape = jax.make_jaxpr(built.train_step, return_shape=True)(built.state, batch)
        return *text(jaxpr), str(shape), str(built.state), str(built.compiler_options), str(layout.mesh)

    return observe


def hosts():
    alone = step()
    fields = ("model", "objective", "learner", "microbatches", "mesh", "compiler_options")
    yield Host(trainer(), alone, fields=fields)
    learner = Learner.Config(rates={"embedding.**": 0.5})
    for schedule in (WarmupCosine(), WarmupStableDecay()):
        yield Host(trainer(learner=learner.set(schedule=schedule)), alone, at="learner")
    yield Host(trainer(learner=learner.set(optimizer=ax.call(optax.scale_by_adam, b2=0.5))), alone, at="learner")
    yield Host(trainer(learner=learner.set(optimizer=Muon.Config())), alone, at="learner.optimizer")
    yield Host(trainer(objective=CrossEntropy.Config(z_loss=0.1, label_smoothing=0.1)), alone, at="objective")
    yield Host(trainer(callbacks={"average": EMA.Config()}), alone, at="callbacks.average")
    mesh = Mesh(shape={"data": 2, "fsdp": 2, "context": 2}, parameters={"embedding.**": {}})
    yield Host(trainer(mesh=mesh.set(context=RingAttention.Config())), step(8, "tpu"), at="mesh")
    yield Host(trainer(mesh=mesh.set(context=AllToAll.Config())), step(8, "tpu"), at="mesh.context")
    for schedule in (GPipe, OneForwardOneBackward, ZeroBubble):
        mesh = Mesh(shape={"pipeline": 2}, pipeline=schedule.Config())
        deep = model(decoder=Repeat.Config(num_layers=4, layers=layer(input_dim=ax.REQUIRED)))
        yield Host(trainer(mesh=mesh, model=deep, microbatches=2), step(2, "tpu"), at="mesh")
