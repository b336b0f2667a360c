"""`put_numerics`: which layers get numerics by default, and what becomes of their stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.config import walk
from axcore.module import abstract
from axcore.nn import (
    Attention,
    FeedForward,
    Linear,
    MultiTokenPrediction,
    Repeat,
    Sequence,
    TransformerLayer,
    Weighted,
    by_layer,
    layers_of,
    put_numerics,
    unstacked,
    without_numerics,
)
from axcore.numerics import Numerics
from axcore.testing import tiny_model
from axcore.train import FromRun, save_model
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat, like

LAYER = tiny_model().decoder.layers
ROUNDED = Numerics.Config()


def model(num_layers=5):
    return tiny_model().set(decoder=Repeat.Config(num_layers=num_layers, layers=LAYER))


def filled(cfg):
    """Paths of the layers with numerics."""
    return {path for path, node in walk(cfg) if getattr(node, "numerics", None) is not None}


def filled_layers(cfg):
    """For each layer, the names of its layers with numerics."""
    return [filled(place.config) for place in layers_of(cfg.decoder)]


EVERY = {
    *(f"attention.{name}" for name in ("query", "key", "value", "projection")),
    *(f"ffn.{name}" for name in ("gate", "up", "down")),
}


@pytest.mark.parametrize("trainer", [False, True])
def test_inner_layers_get_numerics(trainer):
    made = put_numerics(ax.Trainer.Config(model=model()), ROUNDED).model if trainer else put_numerics(model(), ROUNDED)
    present = EVERY & {path for path, _ in walk(LAYER)}
    assert filled_layers(made) == [set(), present, present, present, set()]
    assert all(path.startswith("decoder.") for path in filled(made))


def test_a_repeat_becomes_a_sequence_with_a_shorter_repeat():
    decoder = put_numerics(model(), ROUNDED).decoder
    first, inner, last = decoder.layers
    assert type(first) is type(last) is TransformerLayer.Config and isinstance(inner, Repeat.Config)
    assert inner.num_layers == 3
    assert filled_layers(unstacked(put_numerics(model(), ROUNDED))) == filled_layers(put_numerics(model(), ROUNDED))


def test_groups_and_sequences_are_counted_by_layer():
    other = LAYER.set(ffn=FeedForward.Config(hidden_dim=8))
    group = Repeat.Config(num_layers=2, layers=Sequence.Config(layers=(LAYER, other)))
    for decoder in (group, Sequence.Config(layers=(LAYER, other, LAYER, other))):
        found = filled_layers(put_numerics(model().set(decoder=decoder), ROUNDED))
        assert [bool(each) for each in found] == [False, True, True, False]


def test_linear_maps_that_require_float32_and_other_parts_keep_their_format():
    wide = Linear.Config(dtypes=ax.DTypes(compute=jnp.float32))
    layer = LAYER.set(ffn=FeedForward.Config(hidden_dim=8, down=wide))
    cfg = model().set(decoder=Repeat.Config(num_layers=3, layers=layer), future=(MultiTokenPrediction.Config(),))
    paths = filled(put_numerics(cfg, ROUNDED))
    assert paths
    assert not [path for path in paths if path.endswith("ffn.down") or not path.startswith("decoder.")]


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("decoder.layers.**", [True] * 5),
        ("decoder.layers.ffn.*", [True] * 5),
        (Weighted, [True] * 5),
        ("head", [False] * 5),
    ],
    ids=str,
)
def test_where_overrides_the_default_and_rebuilds_no_stack(where, wanted):
    made = put_numerics(model(), ROUNDED, where)
    assert isinstance(made.decoder, Repeat.Config)
    assert [bool(each) for each in filled_layers(made)] == wanted
    assert (getattr(made.head, "numerics", None) is not None) == (where in ("head", Weighted))


def test_numerics_that_are_there_already_are_kept():
    made = put_numerics(model(), ROUNDED)
    assert put_numerics(made, ROUNDED) == made


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_layers_raise_and_name_the_option(count):
    with pytest.raises(ax.ConfigError, match=rf"^at model.decoder: .*at least 3 layers, not {count}\. .*where='model"):
        put_numerics(ax.Trainer.Config(model=model(count)), ROUNDED)


@pytest.mark.parametrize(
    ("cfg", "where", "message"),
    [
        (LAYER, None, "no stack of layers"),
        (model().set(decoder=Repeat.Config(num_layers=3, layers=ax.nn.RMSNorm.Config())), None, "no linear map"),
        (model(), Attention, "no node that where=.* selects has a slot 'numerics'"),
    ],
    ids=["no stack", "no linear map", "no slot"],
)
def test_nothing_to_fill_raises(cfg, where, message):
    with pytest.raises(ax.ConfigError, match=message):
        put_numerics(cfg, ROUNDED, where)


def test_numerics_with_float_weights_are_removed():
    cfg = put_numerics(model(), ROUNDED, where="decoder.**")
    assert without_numerics(cfg) == model() == without_numerics(model())
    layers = layers_of(without_numerics(put_numerics(model(), ROUNDED)).decoder)
    assert [place.config for place in layers] == 5 * [LAYER]
    kept = put_numerics(model(), ROUNDED.set(stored=True), where="decoder.**.up")
    assert without_numerics(kept) == kept


@pytest.mark.long
def test_weights_of_the_whole_stack_are_loaded_by_number(tmp_path):
    plain, made = model(), put_numerics(model(), ROUNDED)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype), abstract(plain)[1])
    save_model(tmp_path / "plain", plain, params, {})
    form = abstract(made)[1]
    initial = FromRun.Config(folder=str(tmp_path / "plain"))
    found = flat(like(form, initial_arrays(initial, made, flat(form), {}, 0)))
    names = by_layer(plain, flat(params))
    for name, (path, index) in by_layer(made, found).items():
        held, at = names[name]
        np.testing.assert_array_equal(found[path][index], flat(params)[held][at])
