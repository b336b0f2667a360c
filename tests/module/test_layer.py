"""Building layers: slots, widths, dtypes and errors with paths."""

import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axcore as ax
from axcore.module import BuildError, abstract, invoke, stack
from axcore.nn import Attention, FeedForward, Linear, Repeat

from . import tree_mode
from .layers import Parent, Plain, ones


class Block(ax.Layer):
    """Two slots, and a width that both children receive."""

    class Config(ax.Layer.Config):
        dim: int = ax.REQUIRED
        ffn: ax.Layer.Config | None = None
        extra: ax.Layer.Config | None = None

    def __init__(self, cfg, *, rngs):
        self.ffn = self.child("ffn", cfg.ffn, rngs, input_dim=cfg.dim, width=cfg.dim, output_dim=cfg.dim)
        self.extra = self.child("extra", cfg.extra, rngs, width=cfg.dim)

    def __call__(self, x):
        return x if self.extra is None else self.extra(x)


class Deep(ax.Layer):
    class Config(ax.Layer.Config):
        block: ax.Layer.Config = Block.Config(dim=3)

    def __init__(self, cfg, *, rngs):
        self.block = self.child("block", cfg.block, rngs)
        self.stock = nnx.Linear(3, 3, rngs=rngs.at("stock").nnx())


def build(cfg):
    return cfg.build(rngs=ax.Rngs(0))


def test_a_child_takes_only_the_widths_that_it_declares():
    block = build(Block.Config(dim=5, ffn=Linear.Config(), extra=Plain.Config()))
    assert (block.ffn.config.input_dim, block.ffn.config.output_dim) == (5, 5)
    assert block.ffn.weight.shape == (5, 5)
    assert block.extra.config.width == 5


def test_a_child_stores_its_completed_config():
    cfg = Block.Config(dim=5, ffn=Linear.Config(use_bias=True))
    assert build(cfg).ffn.config.use_bias is True
    assert cfg.ffn.input_dim is ax.REQUIRED


def test_a_width_that_contradicts_the_parent_raises_and_names_the_path():
    with pytest.raises(BuildError, match=r"^ffn: input_dim=7 is set on .*Linear.*parent passes input_dim=5"):
        build(Block.Config(dim=5, ffn=Linear.Config(input_dim=7)))
    assert build(Block.Config(dim=5, ffn=Linear.Config(input_dim=5))).ffn.weight.shape == (5, 5)


@pytest.mark.parametrize(
    ("cfg", "start"),
    [
        (Deep.Config(block=Block.Config()), "block: "),
        (Deep.Config(block=Block.Config(dim=3, ffn=FeedForward.Config())), "block.ffn: "),
        (Deep.Config(block=Block.Config(dim=3, ffn=Attention.Config(num_heads=2))), "block.ffn: "),
        (Deep.Config(block=Block.Config(dim=3, ffn=Attention.Config(num_heads=3, num_kv_heads=2))), "block.ffn: "),
        (
            Deep.Config(
                block=Block.Config(dim=4, ffn=FeedForward.Config(hidden_dim=2, up=Linear.Config(output_dim=3)))
            ),
            "block.ffn.up: ",
        ),
        (
            Deep.Config(
                block=Repeat.Config(num_layers=2, input_dim=2, layers=Block.Config(dim=2, ffn=Plain.Config(width=9)))
            ),
            "block.layers.ffn: ",
        ),
    ],
)
def test_an_error_of_a_child_begins_with_its_config_path(cfg, start):
    with pytest.raises(BuildError) as error:
        build(cfg)
    path = start.removesuffix(": ")
    assert str(error.value).startswith((start, f"{path}."))  # the path of the node or of one of its fields
    assert ax.select(cfg, path)  # the message can be pasted into an edit


def test_other_exceptions_have_a_note_with_the_path():
    class Broken(Plain):
        def __init__(self, cfg, *, rngs):
            raise RuntimeError("no luck")

    with pytest.raises(Exception) as error:
        build(Deep.Config(block=Block.Config(dim=3, ffn=Broken.Config())))
    told = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert "no luck" in told
    assert "block.ffn" in told


def test_axes_that_do_not_match_the_shape_raise_and_name_the_parameter():
    class Wrong(ax.Layer):
        class Config(ax.Layer.Config):
            pass

        def __init__(self, cfg, *, rngs):
            self.weight = self.param("weight", (2, 3), ones, rngs, axes=("embed",))

    with pytest.raises(BuildError, match=r"^block\.weight: .*\('embed',\).*\(2, 3\)"):
        build(Deep.Config(block=Wrong.Config()))
    with pytest.raises(BuildError, match=r"^weight: "):
        build(Wrong.Config())


def test_an_initializer_with_a_wrong_shape_names_the_parameter():
    class Wrong(ax.Layer):
        class Config(ax.Layer.Config):
            pass

        def __init__(self, cfg, *, rngs):
            self.weight = self.param("weight", (2,), lambda key, shape, dtype: jnp.ones((3,)), rngs, axes=("embed",))

    with pytest.raises(BuildError, match=r"^block\.weight"):
        build(Deep.Config(block=Wrong.Config()))


def test_a_layer_without_a_constructor_can_be_built():
    class Doubles(ax.Layer):
        class Config(ax.Layer.Config):
            pass

        def __call__(self, x):
            return 2 * x

    layer = build(Doubles.Config())
    assert layer(3) == 6
    assert layer.dtypes == ax.DTypes(param="float32", compute="float32")


def test_an_empty_slot_is_none_and_can_be_filled_later():
    model = build(Parent.Config(children=(("block", Block.Config(dim=3)),)))
    x = jnp.ones(3)
    assert model.block.extra is None
    np.testing.assert_array_equal(model("block", x), x)
    model.block.extra = build(Plain.Config(width=3, summary=True))
    output, collections = invoke(model, "block", x)
    np.testing.assert_allclose(output, model.block.extra.scale[...])
    assert list(collections.summaries) == ["block.extra.mean"]


def test_dtypes_are_inherited_unless_the_child_sets_its_own():
    low, high = ax.DTypes(param="bfloat16", compute="bfloat16"), ax.DTypes(param="float32", compute="bfloat16")
    cfg = Deep.Config(dtypes=low, block=Block.Config(dim=3, ffn=Linear.Config(dtypes=high), extra=Plain.Config()))
    model = build(cfg)
    assert model.block.dtypes == low
    assert model.block.extra.scale.dtype == jnp.bfloat16
    assert model.block.ffn.dtypes == high
    assert model.block.ffn.weight.dtype == jnp.float32
    assert build(Deep.Config()).block.dtypes == ax.DTypes(param="float32", compute="float32")


def test_dtypes_reach_the_layers_of_a_stack():
    cfg = Repeat.Config(
        num_layers=2,
        input_dim=2,
        dtypes=ax.DTypes(param="bfloat16"),
        layers=Block.Config(dim=2, ffn=Plain.Config(), extra=None),
    )
    assert abstract(cfg)[1]["layers"]["ffn"]["scale"].dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["param", "compute"])
@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), np.dtype("bfloat16")], ids=repr)
def test_all_spellings_of_a_dtype_are_equal(name, dtype):
    for made in (ax.DTypes(**{name: dtype}), ax.DTypes().set(**{name: dtype})):
        assert made == ax.DTypes(**{name: jnp.bfloat16})
        assert hash(made) == hash(ax.DTypes(**{name: jnp.bfloat16}))
        assert made.text() == ax.DTypes(**{name: jnp.bfloat16}).text()
        assert isinstance(getattr(made, name), np.dtype)


def test_a_dtype_can_be_overridden_from_text():
    cfg = ax.override(Deep.Config(dtypes=ax.DTypes()), ["dtypes.compute=bfloat16"])
    assert cfg.dtypes == ax.DTypes(compute="bfloat16")


def test_an_unknown_dtype_raises():
    with pytest.raises(ax.ConfigError, match="bfloat17"):
        ax.DTypes(compute="bfloat17")


def test_a_stack_of_plain_nnx_modules_can_be_built():
    class Stock(ax.Layer):
        class Config(ax.Layer.Config):
            pass

        def __init__(self, cfg, *, rngs):
            self.layers = stack(lambda rngs: nnx.Linear(2, 2, rngs=rngs.nnx()), rngs.at("layers"), 3)

        def __call__(self, x):
            return ax.scan(self.layers, x, count=3)

    model = build(Stock.Config())
    assert model.layers.kernel.shape == (3, 2, 2)
    x = np.ones((1, 2), np.float32)
    expected = x
    for kernel in np.asarray(model.layers.kernel[...]):
        expected = expected @ kernel
    np.testing.assert_allclose(model(jnp.asarray(x)), expected, rtol=1e-5)


@pytest.mark.long
def test_graph_mode_and_tree_mode_of_nnx_agree():
    root = pathlib.Path(__file__).parents[2]
    environ = {
        **os.environ,
        "NNX_GRAPH_MODE": "false",
        "NNX_GRAPH_UPDATES": "false",
        "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-m", "tests.module.tree_mode"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=root)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["modes"] == [False, False]
    assert nnx.set_graph_mode.current_value() and nnx.set_graph_updates.current_value()
    for name, numbers in tree_mode.measure().items():
        np.testing.assert_allclose(found[name], numbers, rtol=1e-5, err_msg=name)
