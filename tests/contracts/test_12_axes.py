"""Contract 12: mesh rules name existing axes, and no array is replicated along an axis that they shard."""

import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import axcore as ax
from axcore.config import ConfigError
from axcore.module import abstract
from axcore.parallel import LOGICAL_AXES, Layout, Mesh, constrain
from axcore.testing.devices import on_devices, steps
from axcore.train import Learner
from axcore.train.step.program import program

from .tensor_step import HEAD_DIM, HEADS, HIDDEN, MODEL, ROWS, RULES, SEQ, SPLIT, VOCAB, batch, main

pytestmark = pytest.mark.long

EIGHT = AbstractMesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


class Beams(ax.Layer):
    """Constrains a custom activation axis that no parameter has."""

    activation_axes: ClassVar[tuple[str, ...]] = ("beam",)

    class Config(ax.Layer.Config):
        pass

    def __call__(self, x):
        return constrain(x, "beam", None)


class Codebook(ax.Layer):
    """Has a parameter with a custom axis."""

    class Config(ax.Layer.Config):
        beams: Beams.Config = Beams.Config()

    def __init__(self, cfg, *, rngs):
        self.codes = self.param(
            "codes", (8, 2), lambda key, shape, dtype: jnp.ones(shape, dtype), rngs, axes=("code", None)
        )
        self.beams = self.child("beams", cfg.beams, rngs)

    def __call__(self, x):
        return self.beams(x @ self.codes[...])


@pytest.fixture(scope="module")
def found():
    return on_devices(main)


def test_case_a_rule_for_an_unknown_axis_raises_and_suggests_the_nearest(monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda *_, **__: pytest.fail("something was compiled"))
    layout = Layout(EIGHT, {"batch": "data", "hedas": "tensor"})
    with pytest.raises(ConfigError) as error:
        program(MODEL, Learner.Config(), layout)
    told = str(error.value)
    assert told.startswith("mesh.rules: 'hedas' is not a logical axis of this model. Did you mean 'head'? Known: ")
    assert all(name in told for name in LOGICAL_AXES)


def test_only_axes_declared_in_the_model_are_known():
    fn = abstract(Codebook.Config())[0]
    assert fn.activation_axes == {"beam"}
    assert fn.logical_axes == {"beam", "code"}
    Layout(EIGHT, {"beam": "data", "code": "tensor"}).check_rules(fn.logical_axes)
    for name in ("beam", "code"):
        with pytest.raises(ConfigError, match=f"mesh.rules: '{name}' is not a logical axis of this model"):
            Layout(EIGHT, {name: "data"}).check_rules(abstract(MODEL)[0].logical_axes)


def test_logical_axes_lists_every_axis_of_core_parameters():
    assert abstract(MODEL)[0].logical_axes <= LOGICAL_AXES.keys() >= RULES.keys()


def replicated(shapes):
    """{axis that the rules shard: shapes in which one device has the whole dimension}."""
    whole = {"mlp": HIDDEN, "vocab": VOCAB, "head": HEADS * HEAD_DIM}
    by_axis = {name: [shape for shape in shapes if size in shape] for name, size in whole.items()}
    by_axis["head"] += [shape for shape in shapes if (HEADS, HEAD_DIM) in itertools.pairwise(shape)]
    return {name: shapes for name, shapes in by_axis.items() if shapes}


@pytest.mark.slow
def test_tensor_parallel_parameters_and_moments_are_sharded(found):
    leaves, _ = found["all"]
    sharded = [path for path, (axes, _, _) in leaves.items() if RULES.keys() & set(axes)]
    assert len(sharded) == 3 * 9  # 4 in attention, 3 in the feed-forward block, embedding, head; each with 2 moments
    for path, (axes, entering, leaving) in leaves.items():
        assert entering == leaving == (8 if path in sharded else 1), (path, axes)


@pytest.mark.slow
def test_arrays_inside_the_compiled_step_are_sharded(found):
    assert not replicated(found["all"][1])


def test_the_check_detects_missing_rules(found):
    assert replicated(found["none"]).keys() == {"mlp", "vocab", "head"}
    assert replicated(found["no kv_head"]).keys() == {"head"}


def test_batches_are_sharded_on_entry_and_must_divide(found):
    held, (tokens, rows) = found["entering"]
    assert held == {(ROWS // 2, SEQ // 4)}
    assert tokens.startswith(
        "input.seq_len=17 cannot be split evenly over the 4 devices that mesh.rules assign to 'seq'"
    )
    assert rows.startswith(
        "input.batch_size=3 cannot be split evenly over the 2 devices that mesh.rules assign to 'batch'"
    )


@pytest.mark.slow  # CI checks a sharded sequence in tests/parallel/test_compositions.py
def test_a_sharded_sequence_gives_the_step_of_one_device():
    one = Mesh(shape=dict.fromkeys(SPLIT.shape, 1), rules=SPLIT.rules)
    alone, many = steps(MODEL, batch(), [one, SPLIT])
    np.testing.assert_allclose(many["loss"], alone["loss"], rtol=1e-6)
    for path, update in alone["updates"].items():
        np.testing.assert_allclose(
            many["updates"][path], update, rtol=0, atol=1e-7 + 1e-5 * np.abs(update).max(), err_msg=path
        )


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 6), (("data", "tensor"), None)),
        ((2, 8), ("data", "tensor")),
        ((3, 1), (None, None)),
        ((1, 4), (None, "tensor")),
    ],
)
def test_activations_skip_mesh_axes_that_do_not_divide_them(shape, spec):
    layout = Layout(EIGHT, {"batch": ("data", "tensor"), "seq": "tensor"})
    assert tuple(layout.spec(("batch", "seq"), shape)) == spec


def test_the_platform_is_that_of_the_devices_of_the_layout():
    assert Mesh(shape={"data": 1}, rules={}).make(jax.devices()[:1]).platform == "cpu"
    gpu = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    assert Layout(EIGHT.update(abstract_device=gpu), {}).platform == "gpu"
    with pytest.raises(ConfigError, match=r"has no platform\. Pass it an abstract_device"):
        assert Layout(EIGHT, {}).platform
