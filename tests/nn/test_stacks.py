"""Layers of a decoder by number: finding them, stacking them, editing them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st

import axcore as ax
from axcore.config import walk
from axcore.module import abstract, functional
from axcore.nn import (
    Attention,
    Causal,
    CausalLM,
    FeedForward,
    MultiTokenPrediction,
    Place,
    Repeat,
    Sequence,
    TokenInfo,
    TransformerLayer,
    by_layer,
    edit_layers,
    layers_of,
    stacked,
    unstacked,
    use_remat,
    use_unroll,
)
from axcore.parallel import Remat, SaveMatmuls
from axcore.testing import tiny_model

from .support import call, parameters

pytestmark = pytest.mark.long

DIM = 4


def layer(kind):
    """A small layer; kinds of layers differ in width."""
    return FeedForward.Config(hidden_dim=kind + 2)


def kinds(decoder):
    return [place.config.hidden_dim - 2 for place in layers_of(decoder)]


MOTIFS = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 5)), min_size=1)
PATTERNS = MOTIFS.map(lambda motifs: [kind for motif, count in motifs for kind in motif * count][:40])


@given(PATTERNS)
def test_stacking_keeps_all_layers_in_order(pattern):
    decoder = stacked([layer(kind) for kind in pattern])
    assert kinds(decoder) == pattern
    assert sum(1 for _, node in walk(decoder) if isinstance(node, FeedForward.Config)) <= len(pattern)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(2, 6))
def test_a_group_that_repeats_becomes_one_scan_no_longer_than_the_group(group, count):
    decoder = stacked([layer(kind) for kind in group * count])
    assert isinstance(decoder, Repeat.Config)
    assert sum(1 for _, node in walk(decoder) if isinstance(node, FeedForward.Config)) <= len(group)


@pytest.mark.parametrize(
    ("pattern", "shape"),
    [
        ([0], "0"),
        ([0, 0, 0], "3x(0)"),
        ([0, 1, 0, 1], "2x(01)"),
        ([0, 0, 0, 1, 1, 1, 1], "3x(0) 4x(1)"),  # DeepSeek: some dense layers, then experts
        ([0, 0, 0, 0, 0, 1] * 2 + [0, 0], "2x(000001) 2x(0)"),  # Gemma 3: the last group is incomplete
        ([0, 1, 2], "0 1 2"),
        ([0, 1, 1, 1, 2, 0], "0 3x(1) 2 0"),
    ],
)
def test_stacked_finds_the_shortest_config(pattern, shape):
    decoder = stacked([layer(kind) for kind in pattern])
    parts = decoder.layers if isinstance(decoder, Sequence.Config) else (decoder,)
    found = []
    for part in parts:
        if not isinstance(part, Repeat.Config):  # a layer that does not repeat
            found.append(str(part.hidden_dim - 2))
            continue
        group = part.layers.layers if isinstance(part.layers, Sequence.Config) else (part.layers,)
        found.append(f"{part.num_layers}x({''.join(str(each.hidden_dim - 2) for each in group)})")
    assert " ".join(found) == shape


def at(params, place):
    """The parameters of the layer at a `Place`."""
    for name in place.path.split(".") if place.path else ():
        params = params[int(name) if name.isdigit() else name]
    return jax.tree.map(lambda leaf: leaf[place.index], params)


NESTED = {
    "one scan": Repeat.Config(num_layers=3, layers=layer(0)),
    "pairs": Repeat.Config(num_layers=2, layers=Sequence.Config(layers=(layer(0), layer(1)))),
    "two scans": Sequence.Config(layers=(Repeat.Config(num_layers=2, layers=layer(0)), layer(1),
                                         Repeat.Config(num_layers=1, layers=layer(2)))),
    "a scan in a scan": Repeat.Config(
        num_layers=2,
        layers=Sequence.Config(layers=(Repeat.Config(num_layers=2, layers=layer(0)), layer(1))),
    ),
    "a layer alone": layer(1),
}  # fmt: skip
PLACES = {
    "one scan": [("layers", (0,)), ("layers", (1,)), ("layers", (2,))],
    "pairs": [("layers.layers.0", (0,)), ("layers.layers.1", (0,)), ("layers.layers.0", (1,)),
              ("layers.layers.1", (1,))],
    "two scans": [("layers.0.layers", (0,)), ("layers.0.layers", (1,)), ("layers.1", ()), ("layers.2.layers", (0,))],
    "a scan in a scan": [("layers.layers.0.layers", (0, 0)), ("layers.layers.0.layers", (0, 1)),
                         ("layers.layers.1", (0,)), ("layers.layers.0.layers", (1, 0)),
                         ("layers.layers.0.layers", (1, 1)), ("layers.layers.1", (1,))],
    "a layer alone": [("", ())],
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_places_contain_the_paths_of_each_layer_s_parameters(name):
    decoder = NESTED[name].set(input_dim=DIM)
    places = layers_of(decoder)
    assert [(place.path, place.index) for place in places] == PLACES[name]
    params = parameters(decoder)
    x = np.random.default_rng(0).normal(size=(2, 3, DIM)).astype(np.float32)
    expected = x
    for place in places:
        expected = call(place.config.set(input_dim=DIM), at(params, place), expected)[0]
    assert isinstance(places[0], Place)
    np.testing.assert_allclose(call(decoder, params, x)[0], expected, rtol=1e-5, atol=1e-7)


@settings(max_examples=6)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=6))
def test_a_stack_applies_its_layers_in_order(pattern):
    decoder = stacked([layer(kind) for kind in pattern]).set(input_dim=DIM)
    params = parameters(decoder)
    x = expected = np.random.default_rng(0).normal(size=(2, 3, DIM)).astype(np.float32)
    for kind, place in zip(pattern, layers_of(decoder), strict=True):
        expected = call(layer(kind).set(input_dim=DIM), at(params, place), expected)[0]
    np.testing.assert_allclose(call(decoder, params, x)[0], expected, rtol=1e-5, atol=1e-7)


def repeats(cfg):
    return [node for _, node in walk(cfg) if isinstance(node, Repeat.Config)]


def test_remat_and_unroll_apply_to_every_scan():
    decoder = stacked([layer(kind) for kind in [0, 0, 1, 2, 1, 2, 1, 2]], remat=SaveMatmuls(), unroll=2)
    plain, grouped = repeats(decoder)
    assert (plain.num_layers, plain.unroll, plain.remat) == (2, 2, SaveMatmuls())
    assert (grouped.num_layers, grouped.unroll, grouped.remat) == (3, 1, None)  # one step is a group of two layers
    assert grouped.layers.remat == SaveMatmuls()  # ... and each of them is recomputed separately
    assert [each.unroll for each in repeats(stacked([layer(0)] * 3, unroll=100))] == [3]


def test_use_remat_sets_the_policy_of_each_layer():
    decoder = use_remat(stacked([layer(kind) for kind in [0, 1, 1, 1, 2, 1, 2, 1]]), Remat())
    assert [type(part).__qualname__ for part in decoder.layers] == ["FeedForward.Config", *["Repeat.Config"] * 2]
    assert decoder.remat == Remat()  # the policy of the first layer
    assert [(part.remat, getattr(part.layers, "remat", None)) for part in decoder.layers[1:]] == [
        (Remat(), None),
        (None, Remat()),
    ]
    assert use_remat(decoder, None) == stacked([layer(kind) for kind in [0, 1, 1, 1, 2, 1, 2, 1]])


def test_use_unroll_unrolls_every_scan_and_undoes_it():
    decoder = stacked([layer(kind) for kind in [0, 0, 0, 1, 2, 1, 2]])
    unrolled = use_unroll(decoder, True)
    assert [(each.num_layers, each.unroll) for each in repeats(unrolled)] == [(3, 3), (2, 2)]
    assert use_unroll(unrolled, False) == decoder


def test_layers_that_do_not_repeat_are_recomputed_separately():
    decoder = stacked([layer(kind) for kind in [0, 1, 1]], remat=SaveMatmuls())
    assert decoder.remat == SaveMatmuls()
    assert decoder.layers[0] == layer(0)
    assert decoder.layers[1].remat == SaveMatmuls()


def test_a_decoder_requires_a_layer_built_from_a_config():
    with pytest.raises(ax.ConfigError, match="stacked requires at least one layer"):
        stacked([])


def numbered(cfg, where=FeedForward):
    """(config with each selected layer's number as its width, [(number, path)] in the order of the edits)."""
    told = []

    def edit(path, node, number):
        told.append((number, path))
        return node.set(hidden_dim=100 + number)

    return edit_layers(cfg, where, edit), told


@pytest.mark.parametrize("name", NESTED)
def test_layers_are_numbered_in_execution_order(name):
    decoder, told = numbered(NESTED[name])
    count = len(layers_of(NESTED[name]))
    assert [number for number, _ in told] == list(range(count))
    assert [place.config.hidden_dim for place in layers_of(decoder)] == [100 + number for number in range(count)]


@given(PATTERNS, st.integers(1, 4))
def test_editing_every_nth_layer_edits_no_other_layer(pattern, every):
    decoder = stacked([layer(kind) for kind in pattern])

    def edit(_, node, number):
        return node.set(hidden_dim=50) if number % every == 0 else node

    found = [place.config.hidden_dim for place in layers_of(edit_layers(decoder, FeedForward, edit))]
    assert found == [50 if number % every == 0 else kind + 2 for number, kind in enumerate(pattern)]


def test_equal_edits_keep_the_scan_and_empty_edits_keep_the_config():
    cfg = tiny_model()
    same = edit_layers(cfg, FeedForward, lambda path, node, number: node.set(hidden_dim=32))
    assert same == ax.select(cfg, FeedForward).set(hidden_dim=32)
    assert edit_layers(cfg, FeedForward, lambda path, node, number: node) == cfg


def test_editing_every_second_layer_of_a_scan_gives_a_scan_over_pairs():
    cfg = ax.select(tiny_model(), "decoder").set(num_layers=6, remat=Remat(), unroll=2)
    edited = edit_layers(cfg, Attention, lambda path, node, number: node.set(mask=Causal()) if number % 2 else node)
    (scan,) = repeats(edited)
    assert (scan.num_layers, scan.unroll, scan.layers.remat) == (3, 1, Remat())  # a step contains two layers, as before
    assert len(scan.layers.layers) == 2
    assert edited.set(decoder=cfg.decoder) == cfg  # nothing else changed
    abstract(edited)


def test_a_rebuilt_stack_keeps_dtypes_and_tags():
    types = ax.DTypes(compute="bfloat16")
    cfg = ax.select(tiny_model(), "decoder").set(num_layers=5, dtypes=types, tags=("mine",))
    cfg = ax.select(cfg, "decoder.layers").set(tags=("layer",), dtypes=ax.DTypes(param="bfloat16"))
    edited = edit_layers(cfg, FeedForward, lambda path, node, number: node.set(hidden_dim=32) if number == 2 else node)
    assert edited.decoder.dtypes == types
    assert edited.decoder.tags == ("mine",)
    for place in layers_of(edited.decoder):
        assert (place.config.tags, place.config.dtypes) == (("layer",), ax.DTypes(param="bfloat16"))
    shapes = abstract(edited)[1]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(shapes["decoder"])} == {"bfloat16"}


def test_layer_numbers_continue_in_multi_token_prediction_modules():
    cfg = tiny_model().set(future=(MultiTokenPrediction.Config(layer=tiny_model().decoder.layers),))
    edited, told = numbered(cfg)
    assert [path.partition(".")[0] for _, path in told] == ["decoder", "decoder", "future"]
    assert edited.future[0].layer.ffn.hidden_dim == 102


def test_a_rebuilt_model_runs():
    edited, _ = numbered(ax.select(tiny_model(), "decoder").set(num_layers=3))
    assert np.isfinite(call(edited, parameters(edited, scale=0.1), np.zeros((1, 3), np.int32))[0]).all()


class Hand(ax.Layer):
    """Shares its width with later layers."""

    class Config(ax.Layer.Config):
        hidden_dim: int = 0

    def __call__(self, x):
        self.share("width", x[..., :1] * 0 + self.config.hidden_dim)
        return x


class Take(ax.Layer):
    """Adds the last shared value."""

    class Config(ax.Layer.Config):
        hidden_dim: int = 0

    def __call__(self, x):
        return x + self.shared("width") + self.config.hidden_dim


def test_rebuilding_a_stack_keeps_layers_that_share_values_together():
    group = Sequence.Config(layers=(Hand.Config(hidden_dim=1), Take.Config(), Take.Config()))
    cfg = Repeat.Config(input_dim=1, num_layers=3, layers=group)

    def edit(_, node, number):
        return node.set(hidden_dim=10) if number == 5 else node

    edited = edit_layers(cfg, lambda _, node: isinstance(node, Hand.Config | Take.Config), edit).set(input_dim=1)
    assert [place.config.hidden_dim for place in layers_of(edited)] == [1, 0, 0, 1, 0, 10, 1, 0, 0]
    assert call(edited, parameters(edited), np.zeros((1, 1, 1), np.float32))[0] == 16


class OtherRepeat(Repeat):
    """A stack with a parameter outside its layers, such as a pipeline."""

    class Config(Repeat.Config):
        stages: int = 2


def test_a_custom_stack_is_not_replaced_by_a_core_stack():
    cfg = tiny_model().set(decoder=OtherRepeat.Config(num_layers=4, layers=tiny_model().decoder.layers))
    same = edit_layers(cfg, FeedForward, lambda path, node, number: node.set(hidden_dim=32))
    assert same == ax.select(cfg, FeedForward).set(hidden_dim=32)
    with pytest.raises(ax.ConfigError, match=r"at decoder: the layers of a .*OtherRepeat are unequal.* Override"):
        numbered(cfg)


@pytest.mark.parametrize("name", [name for name in NESTED if name != "a layer alone"])
def test_names_of_parameters_contain_the_number_of_the_layer(name):
    decoder = NESTED[name].set(input_dim=DIM)
    leaves = jax.tree.leaves_with_path(abstract(decoder)[1])
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    expected = {}
    for number, (path, index) in enumerate(PLACES[name]):
        for part in ("gate", "up", "down"):
            expected[f"{number}.{part}.weight"] = (f"{path}.{part}.weight", index)
    assert by_layer(decoder, paths) == expected
    model = CausalLM.Config(vocab_size=3, dim=DIM, decoder=NESTED[name])
    assert by_layer(model, ["norm.scale"]) == {"norm.scale": ("norm.scale", ())}
    assert by_layer(model, [f"decoder.{path}" for path in paths]) == {
        f"decoder.{number}": (f"decoder.{path}", index) for number, (path, index) in expected.items()
    }


def test_failed_edits_name_the_path_and_empty_selections_raise():
    with pytest.raises(ax.ConfigError, match=r"at decoder\.layers\.ffn: .*Did you mean 'hidden_dim'"):
        edit_layers(tiny_model(), FeedForward, lambda path, node, number: node.set(hiden_dim=3))
    with pytest.raises(ax.ConfigError, match=r"at decoder\.layers\.ffn: the edit returned 7, not a config"):
        edit_layers(tiny_model(), FeedForward, lambda path, node, number: 7)
    with pytest.raises(ax.ConfigError):
        edit_layers(tiny_model(), "nowhere.**", lambda path, node, number: node)


def test_numbering_requires_the_number_of_layers():
    cfg = CausalLM.Config(vocab_size=7, dim=DIM, decoder=Repeat.Config(layers=TransformerLayer.Config()))
    for run in (lambda: layers_of(cfg.decoder), lambda: edit_layers(cfg, FeedForward, lambda path, node, number: node)):
        with pytest.raises(ax.ConfigError, match="num_layers of a Repeat is REQUIRED; set it before"):
            run()


NIGHTLY = [pytest.param(pattern, marks=pytest.mark.slow) for pattern in ("aabaabaa", "abababab", "abcdefgh")]


@pytest.mark.parametrize("pattern", ["aaaaaaaa", *NIGHTLY])
def test_remat_stores_at_most_the_input_of_each_layer_for_every_grouping(pattern):
    """Gradients are equal to those without remat, and the backward pass stores fewer bytes."""

    def temporaries(remat):
        layers = [
            TransformerLayer.Config(
                attention=Attention.Config(num_heads=2, softcap=1.0 + ord(kind)), ffn=FeedForward.Config(hidden_dim=64)
            )
            for kind in pattern
        ]
        fn, params, state = functional(stacked(layers, remat=remat).set(input_dim=16).build(rngs=ax.Rngs(0)))
        x = jax.random.normal(jax.random.key(0), (4, 32, 16))
        tokens = TokenInfo.of(jnp.zeros((4, 32), jnp.int32))
        step = jax.jit(jax.grad(lambda params: jnp.square(fn(params, state, x, tokens)[0][0]).sum())).lower(params)
        compiled = step.compile({"xla_backend_optimization_level": 1})
        return compiled.memory_analysis().temp_size_in_bytes, compiled(params)

    (all_kept, expected), (few_kept, found) = temporaries(None), temporaries(Remat())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
    assert few_kept < 0.5 * all_kept


def test_case_an_unstacked_layer_that_uses_no_dtypes_gets_none():
    norm = ax.stock(nnx.RMSNorm, widths={"num_features": "input_dim"})
    types = ax.DTypes(compute=jnp.bfloat16)
    inner = Repeat.Config(num_layers=2, layers=norm, dtypes=types)
    flat = unstacked(Sequence.Config(input_dim=8, layers=(inner,)))
    assert [each.dtypes for each in flat.layers] == [None, None]
    assert len(jax.tree.leaves(abstract(flat)[1])) == 2
