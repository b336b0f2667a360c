"""PRNG keys derived from paths."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axcore as ax
from axcore.module import fold, invoke

from .layers import Draw, Parent, Plain, Stacked, Unrolled


def bits(key):
    return np.asarray(jax.random.key_data(key))


def build(cfg, seed=0):
    return cfg.build(rngs=ax.Rngs(seed))


def test_fold_hashes_names_and_folds_numbers_directly():
    key = jax.random.key(0)
    word = int.from_bytes(hashlib.sha256(b"dropout").digest()[:4], "big")
    np.testing.assert_array_equal(bits(fold(key, "dropout")), bits(jax.random.fold_in(key, word)))
    np.testing.assert_array_equal(bits(fold(key, "3")), bits(jax.random.fold_in(key, 3)))
    np.testing.assert_array_equal(bits(fold(key, 3)), bits(jax.random.fold_in(key, 3)))
    np.testing.assert_array_equal(bits(fold(key, jnp.asarray(3))), bits(jax.random.fold_in(key, 3)))


def test_rngs_have_the_path_and_fold_each_name():
    rngs = ax.Rngs(5)
    below = rngs.at("decoder").at("norm")
    assert (rngs.path, below.path) == ("", "decoder.norm")
    np.testing.assert_array_equal(bits(below.key), bits(fold(fold(jax.random.key(5), "decoder"), "norm")))
    assert not np.array_equal(bits(below.key), bits(rngs.at("norm").at("decoder").key))


def test_the_index_of_a_stack_folds_like_the_name_of_that_number():
    rngs = ax.Rngs(0).at("layers")
    np.testing.assert_array_equal(bits(rngs.index(jnp.asarray(2)).key), bits(rngs.at("2").key))
    assert rngs.index(jnp.asarray(2)).path == "layers"


def test_rngs_accept_a_key_or_a_seed():
    np.testing.assert_array_equal(bits(ax.Rngs(3).key), bits(ax.Rngs(jax.random.key(3)).key))
    np.testing.assert_array_equal(bits(ax.Rngs(np.int32(3)).key), bits(ax.Rngs(3).key))


def test_a_new_sibling_changes_neither_parameters_nor_draws():
    plain, draw = Plain.Config(width=3), Draw.Config()
    few = build(Parent.Config(children=(("a", plain), ("d", draw))))
    many = build(Parent.Config(children=(("new", plain), ("a", plain), ("other", draw), ("d", draw))))
    np.testing.assert_array_equal(few.a.scale[...], many.a.scale[...])
    key = jax.random.key(1)
    np.testing.assert_array_equal(invoke(few, "d", key=key)[0], invoke(many, "d", key=key)[0])


def test_siblings_with_one_config_have_different_parameters_and_draws():
    plain, draw = Plain.Config(width=3), Draw.Config()
    parent = build(Parent.Config(children=(("a", plain), ("b", plain), ("c", draw), ("d", draw))))
    assert not np.allclose(parent.a.scale[...], parent.b.scale[...])
    key = jax.random.key(1)
    assert not np.array_equal(invoke(parent, "c", key=key)[0], invoke(parent, "d", key=key)[0])


def test_draws_of_one_call_differ_and_the_next_call_repeats_them():
    draw = build(Draw.Config())
    drawn = invoke(draw, key=jax.random.key(1))[0]
    assert len(np.unique(drawn, axis=0)) == 3
    np.testing.assert_array_equal(drawn, invoke(draw, key=jax.random.key(1))[0])
    assert not np.array_equal(drawn, invoke(draw, key=jax.random.key(2))[0])


def test_a_draw_equals_the_key_folded_along_the_path():
    nested = Parent.Config(children=(("inner", Draw.Config()),))
    parent = build(Parent.Config(children=(("outer", nested),)))
    drawn = invoke(parent, "outer", "inner", key=jax.random.key(4))[0]
    here = fold(fold(jax.random.key(4), "outer"), "inner")
    np.testing.assert_array_equal(drawn[0], bits(fold(here, "a")))
    np.testing.assert_array_equal(drawn[2], bits(fold(here, "b")))


@pytest.mark.parametrize("count", [1, 3])
def test_a_stack_has_the_initial_parameters_of_separate_layers(count):
    layer = Plain.Config(width=4)
    stacked, unrolled = (
        build(Stacked.Config(layer=layer, count=count)),
        build(Unrolled.Config(layer=layer, count=count)),
    )
    expected = np.stack([np.asarray(one.scale[...]) for one in unrolled.layers])
    np.testing.assert_allclose(stacked.layers.scale[...], expected, rtol=1e-6)
    assert len(np.unique(expected, axis=0)) == count


def test_a_longer_stack_keeps_the_layers_of_a_shorter_one():
    layer = Plain.Config(width=4)
    short, long = build(Stacked.Config(layer=layer, count=2)), build(Stacked.Config(layer=layer, count=3))
    np.testing.assert_allclose(short.layers.scale[...], long.layers.scale[...][:2], rtol=1e-6)


def test_a_stack_names_its_new_axis():
    assert build(Stacked.Config(layer=Plain.Config(width=4))).layers.scale.get_metadata()["axes"] == ("layer", "embed")


def test_the_nnx_rngs_of_a_plain_module_depend_on_the_path():
    one, two = ax.Rngs(0).at("a").nnx(), ax.Rngs(0).at("b").nnx()
    assert not np.array_equal(bits(one.params()), bits(two.params()))
    np.testing.assert_array_equal(bits(ax.Rngs(0).at("a").nnx().params()), bits(ax.Rngs(0).at("a").nnx().params()))


class Twice(ax.Layer):
    """Uses one name for two things, in several ways."""

    class Config(ax.Layer.Config):
        how: str

    def __init__(self, cfg, *, rngs):
        match cfg.how:
            case "children":
                self.a = self.child("same", Plain.Config(width=3), rngs)
                self.b = self.child("same", Plain.Config(width=3), rngs)
            case "lists":
                self.a = self.children("same", [Plain.Config(width=3)], rngs)
                self.b = self.children("same", [Plain.Config(width=3)], rngs)
            case "parameters":
                self.a = self.param("same", (3,), jax.nn.initializers.normal(), rngs, axes=(None,))
                self.b = self.param("same", (3,), jax.nn.initializers.normal(), rngs, axes=(None,))
            case "children without names":
                self.a = Plain.Config(width=3).build(rngs=rngs)
                self.b = Plain.Config(width=3).build(rngs=rngs)
            case "modules of Flax":
                self.a = nnx.Linear(2, 2, rngs=rngs.at("same").nnx())
                self.b = nnx.Linear(2, 2, rngs=rngs.at("same").nnx())
            case "own names":
                self.a = self.child("a", Plain.Config(width=3), rngs)
                self.b = nnx.Linear(2, 2, rngs=rngs.at("b").nnx())


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("children", "same"),
        ("lists", "same.0"),
        ("parameters", "same"),
        ("children without names", "scale"),
        ("modules of Flax", "same"),
    ],
)
def test_case_a_name_that_is_used_twice_raises(how, where):
    with pytest.raises(ax.ConfigError, match=rf"^{where}: two children or parameters .* would start with equal"):
        build(Twice.Config(how=how))


def test_case_rngs_can_build_several_models():
    rngs = ax.Rngs(0)
    one, two = (Twice.Config(how="own names").build(rngs=rngs) for _ in range(2))
    np.testing.assert_array_equal(one.b.kernel[...], two.b.kernel[...])


def test_case_names_of_digits_have_different_keys():
    key = jax.random.key(0)
    names = ("3", "03", "\u0663", str(3 + 2**32), str(3 + 2**64))
    assert len({bits(fold(key, name)).tobytes() for name in names}) == len(names)
