"""Contract 12: rules name axes that exist, and what they shard is nowhere replicated."""

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
    """Constrains an axis of its own that no parameter carries."""

    activation_axes: ClassVar[tuple[str, ...]] = ("beam",)

    class Config(ax.Layer.Config):
        pass

    def __call__(self, x):
        return constrain(x, "beam", None)


class Codebook(ax.Layer):
    """Has a parameter of an axis of its own."""

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


def test_a_rule_for_an_unknown_axis_is_an_error_that_lists_the_known_and_suggests_the_nearest(monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda *_, **__: pytest.fail("something was compiled"))
    layout = Layout(EIGHT, {"batch": "data", "hedas": "tensor"})
    with pytest.raises(ConfigError) as error:
        program(MODEL, Learner.Config(), layout)
    told = str(error.value)
    assert told.startswith("mesh.rules: 'hedas' is not a logical axis of this model. Did you mean 'head'? Known: ")
    assert all(name in told for name in LOGICAL_AXES)


def test_axes_that_a_parameter_or_a_layer_below_declares_are_known_and_others_of_that_kind_are_not():
    fn = abstract(Codebook.Config())[0]
    assert fn.activation_axes == {"beam"}
    assert fn.logical_axes == {"beam", "code"}
    Layout(EIGHT, {"beam": "data", "code": "tensor"}).check_rules(fn.logical_axes)
    for name in ("beam", "code"):
        with pytest.raises(ConfigError, match=f"mesh.rules: '{name}' is not a logical axis of this model"):
            Layout(EIGHT, {name: "data"}).check_rules(abstract(MODEL)[0].logical_axes)


def test_every_axis_of_the_core_s_parameters_is_in_the_vocabulary():
    assert abstract(MODEL)[0].logical_axes <= LOGICAL_AXES.keys() >= RULES.keys()


def replicated(shapes):
    """The shapes of which one device has a whole dimension that the rules shard, by the axis."""
    whole = {"mlp": HIDDEN, "vocab": VOCAB, "head": HEADS * HEAD_DIM}
    by_axis = {name: [shape for shape in shapes if size in shape] for name, size in whole.items()}
    by_axis["head"] += [shape for shape in shapes if (HEADS, HEAD_DIM) in itertools.pairwise(shape)]
    return {name: shapes for name, shapes in by_axis.items() if shapes}


def test_no_parameter_and_no_moment_of_a_tensor_parallel_step_is_replicated_that_the_rules_shard(found):
    leaves, _ = found["all"]
    sharded = [path for path, (axes, _, _) in leaves.items() if RULES.keys() & set(axes)]
    assert len(sharded) == 3 * 9  # four of attention, three of the feed-forward block, embedding and head; two moments
    for path, (axes, entering, leaving) in leaves.items():
        assert entering == leaving == (8 if path in sharded else 1), (path, axes)


def test_no_array_inside_the_compiled_step_is_replicated_that_the_rules_shard(found):
    assert not replicated(found["all"][1])


def test_the_check_sees_axes_without_their_rules(found):
    assert replicated(found["none"]).keys() == {"mlp", "vocab", "head"}
    assert replicated(found["no kv_head"]).keys() == {"head"}


def test_rows_and_tokens_of_a_batch_are_split_on_entry_and_a_count_that_does_not_divide_says_so(found):
    held, (tokens, rows) = found["entering"]
    assert held == {(ROWS // 2, SEQ // 4)}
    assert tokens.startswith(
        "input.seq_len=17 cannot be split evenly over the 4 devices that mesh.rules assign to 'seq'"
    )
    assert rows.startswith(
        "input.batch_size=3 cannot be split evenly over the 2 devices that mesh.rules assign to 'batch'"
    )


def test_a_sequence_that_is_split_gives_the_step_of_one_device():
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
def test_a_dimension_of_an_activation_that_does_not_divide_stays_whole_on_the_axes_that_do_not_fit(shape, spec):
    layout = Layout(EIGHT, {"batch": ("data", "tensor"), "seq": "tensor"})
    assert tuple(layout.spec(("batch", "seq"), shape)) == spec


def test_the_platform_is_that_of_the_devices_and_not_of_this_process():
    assert Mesh(shape={"data": 1}, rules={}).make(jax.devices()[:1]).platform == "cpu"
    gpu = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    assert Layout(EIGHT.update(abstract_device=gpu), {}).platform == "gpu"
    with pytest.raises(ConfigError, match=r"has no platform\. Pass it an abstract_device"):
        assert Layout(EIGHT, {}).platform
