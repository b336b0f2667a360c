"""Layouts, partial rotation, scalings, ALiBi and learned positions: formulas in float64 and invalid input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.module import abstract, functional
from axcore.nn import ContiguousCache, layers_of
from axcore.testing import tiny_batch, tiny_model
from axcore_rope.alibi import slopes
from axcore_rope.published import from_rope_parameters, scaling_of
from axcore_rope.rotary import Rotary
from axcore_rope.scaling import DynamicNTK, Linear, Llama3, LongRoPE, Scaling, YaRN

pytestmark = pytest.mark.long

POSITIONS = np.array([[0, 1, 2, 0, 1]], np.int32)


def features(head_dim=8):
    return np.random.default_rng(0).normal(size=(1, 5, 2, head_dim)).astype(np.float32)


def rotated(x, **fields):
    rotary = Rotary.Config(head_dim=x.shape[-1], **fields).build(rngs=ax.Rngs(0))
    return np.asarray(jax.jit(lambda x: rotary(x, None, POSITIONS, POSITIONS)[0])(x))


def turned_pairs(x, rates, factor=1.0):
    """Rotates features 2 i and 2 i + 1 as one complex number, in float64."""
    numbers = x[..., ::2].astype(np.float64) + 1j * x[..., 1::2]
    numbers = factor * numbers * np.exp(1j * POSITIONS[:, :, None, None] * rates)
    return np.stack([numbers.real, numbers.imag], axis=-1).reshape(x.shape)


def test_interleaved_layout_pairs_adjacent_features():
    x, rates = features(), 100.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(rotated(x, theta=100.0, layout="interleaved"), turned_pairs(x, rates), atol=1e-5)


def test_the_layouts_differ_by_a_permutation_of_features():
    x = features()
    halves = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    turned = rotated(halves)
    back = np.stack(np.split(turned, 2, axis=-1), axis=-1).reshape(x.shape)
    np.testing.assert_allclose(back, rotated(x, layout="interleaved"), atol=1e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotary_dim_rotates_only_the_leading_features(layout):
    x = features()
    out = rotated(x, rotary_dim=4, layout=layout)
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])
    np.testing.assert_allclose(out[..., :4], rotated(x[..., :4], layout=layout), atol=1e-6)


class Halved(Scaling):
    """A custom scaling."""

    def rates(self, theta, rotary_dim, length):
        return 0.5 * theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)

    @property
    def attention_scaling(self):
        return 3.0


def test_custom_scaling():
    x, rates = features(), 0.5 * 10_000.0 ** (-np.arange(4) / 4)
    found = rotated(x, layout="interleaved", scaling=Halved())
    np.testing.assert_allclose(found, turned_pairs(x, rates, 3.0), atol=1e-5)


def test_rates_by_length_use_the_largest_position():
    short = LongRoPE(short=(1.0,) * 4, long=(2.0,) * 4, original_max=3)
    x, rates = features(), 10_000.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(rotated(x, scaling=short, layout="interleaved"), turned_pairs(x, rates), atol=1e-5)
    long = short.set(original_max=2)
    np.testing.assert_allclose(rotated(x, scaling=long, layout="interleaved"), turned_pairs(x, rates / 2), atol=1e-5)


def test_case_rows_have_rates_of_their_own_length():
    cfg = Rotary.Config(head_dim=8, scaling=LongRoPE(short=(1.0,) * 4, long=(2.0,) * 4, original_max=3))
    rotary, x = cfg.build(rngs=ax.Rngs(0)), np.concatenate([features(), 2 * features()])
    positions = np.array([[0, 1, 2, 3, 4], [0, 1, 2, 2, 2]], np.int32)
    both = rotary(x, x, positions, positions)
    for row in range(2):
        alone = rotary(x[row : row + 1], x[row : row + 1], positions[row : row + 1], positions[row : row + 1])
        for found, expected in zip(both, alone, strict=True):
            np.testing.assert_array_equal(found[row], expected[0])


def test_case_a_decoder_refuses_stale_keys_beyond_the_original_length():
    """A row that grows beyond it, or shrinks below, is NaN until it is restarted. Other rows are as if alone."""
    scaling = LongRoPE(short=(1.0, 1.0), long=(0.1, 9.0), original_max=5)
    model, ids = ax.pipe(tiny_model(), ax.use("rope", scaling=scaling)).build(rngs=ax.Rngs(0)), tiny_batch()["inputs"]
    fn, params, state = functional(model)
    full = jax.jit(lambda row, end: fn(params, state, row, positions=jnp.minimum(jnp.arange(8), end - 1)[None])[0][0])
    decoder, held, state_of = Decoder.of(model, cache=ContiguousCache.Config(), batch_size=2, max_len=8)
    step = jax.jit(decoder.__call__)

    def run(state_of, start, lengths):
        new = np.stack([np.roll(row, -begin) for row, begin in zip(ids, start, strict=True)])
        return step(held, state_of, Step(jnp.asarray(new), jnp.asarray(start), lengths=jnp.asarray(lengths)))

    def check(logits, row, start, end):
        expected = full(ids[row : row + 1], end)[0, start:end]
        np.testing.assert_allclose(logits[row, : end - start], expected, rtol=1e-4, atol=1e-5)

    logits, state_of = run(state_of, (0, 0), (4, 7))
    check(logits, 0, 0, 4)
    check(logits, 1, 0, 7)
    logits, state_of = run(state_of, (4, 7), (2, 1))
    assert np.isnan(logits[0]).all()  # four tokens are short, six are long
    check(logits, 1, 7, 8)
    logits, state_of = run(state_of, (6, 2), (1, 3))
    assert np.isnan(logits).all()  # after the cached tokens; eight tokens are long, five are short
    logits, state_of = run(state_of, (0, 7), (6, 1))
    check(logits, 0, 0, 6)
    assert np.isnan(logits[1]).all()  # the step before replaced its keys


@pytest.mark.parametrize(
    ("feature", "options"),
    [
        ("rope", {"scaling": YaRN(factor=4.0, original_max=4), "layout": "interleaved"}),
        ("rope", {"scaling": DynamicNTK(factor=4.0, original_max=8)}),  # original_max covers the whole row
        ("rope", {"scaling": Llama3(factor=8.0, original_max=4), "rotary_dim": 2, "skip_every": 2}),
        ("alibi", {}),
        ("learned-positions", {"max_len": 8}),
    ],
)
def test_decoding_matches_the_full_pass(feature, options):
    model, ids = ax.pipe(tiny_model(), ax.use(feature, **options)).build(rngs=ax.Rngs(0)), tiny_batch()["inputs"]
    fn, params, state = functional(model)
    expected = fn(params, state, ids)[0][0]
    decoder, params, state = Decoder.of(model, cache=ContiguousCache.Config(), batch_size=2, max_len=8)
    step, found = jax.jit(decoder.__call__), []
    for place in range(8):
        logits, state = step(params, state, Step(ids[:, place : place + 1], jnp.full((2,), place)))
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=1e-4, atol=1e-5)


def test_queries_and_keys_of_a_call_share_rates():
    rotary = Rotary.Config(head_dim=8, scaling=DynamicNTK(factor=2.0, original_max=2)).build(rngs=ax.Rngs(0))
    x = features()
    alone = rotary(x, x, POSITIONS[:, :1], POSITIONS)  # one query at position 0, keys up to 2
    np.testing.assert_array_equal(alone[1], rotary(x, x, POSITIONS, POSITIONS)[1])


def test_skip_every_removes_rope_from_every_nth_layer():
    cfg = ax.select(tiny_model(), "decoder").set(num_layers=6)
    for before in (cfg, ax.pipe(cfg, ax.use("rope"))):  # with and without RoPE in every layer
        found = ax.pipe(before, ax.use("rope", skip_every=3))
        with_rope = [place.config.attention.position is not None for place in layers_of(found.decoder)]
        assert with_rope == [True, True, False] * 2


def test_local_and_global_layers_can_have_different_theta():
    cfg = ax.pipe(
        ax.select(tiny_model(), "decoder").set(num_layers=4), ax.use("sliding-window", size=3, global_every=2)
    )
    is_global = lambda path, node: hasattr(node, "mask") and len(node.mask.masks) == 2  # noqa: E731
    is_local = lambda path, node: hasattr(node, "mask") and len(node.mask.masks) == 3  # noqa: E731
    found = ax.pipe(
        cfg,
        ax.use("rope", theta=10_000.0, where=is_local),
        ax.use("rope", theta=1e6, scaling={"rope_type": "linear", "factor": 8.0}, where=is_global),
    )
    positions = [place.config.attention.position for place in layers_of(found.decoder)]
    assert [(each.theta, each.scaling) for each in positions] == [(1e4, None), (1e6, Linear(factor=8.0))] * 2


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12])
def test_alibi_slopes(heads):
    found = slopes(heads)
    assert len(found) == heads and all(0 < slope <= 1 for slope in found)
    if heads == 8:
        assert found == [2.0**-i for i in range(1, 9)]


def test_learned_positions_are_added_and_restart_per_document():
    cfg = ax.pipe(tiny_model(), ax.use("learned-positions", max_len=8))
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    fn, ids = jax.jit(fn), tiny_batch()["inputs"]
    start = jnp.zeros((2, 8), jnp.int32).at[:, 4:].set(1)
    restarted = jnp.concatenate([jnp.arange(4), jnp.arange(4)])[None].repeat(2, axis=0)
    packed = fn(params, state, ids, positions=restarted, segment_ids=start)[0][0]
    alone = fn(params, state, ids[:, 4:])[0][0]
    np.testing.assert_allclose(packed[:, 4:], alone, rtol=1e-4, atol=1e-5)
    moved = fn({**params, "position": {"weight": params["position"]["weight"] + 1.0}}, state, ids)[0][0]
    assert np.abs(moved - fn(params, state, ids)[0][0]).max() > 1e-3


def test_positions_beyond_max_len_give_nan_or_raise():
    cfg = ax.pipe(tiny_model(), ax.use("learned-positions", max_len=6))
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    with pytest.raises(ax.ConfigError, match="position: the row has 8 tokens, but max_len=6"):
        fn(params, state, tiny_batch()["inputs"])
    far = fn(params, state, tiny_batch()["inputs"][:, :1], positions=jnp.full((2, 1), 6))[0][0]
    assert np.isnan(far).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Llama3(factor=8.0, original_max=8, high_freq_factor=1.0), "must exceed low_freq_factor"),
        (
            lambda: scaling_of({"rope_type": "yarm", "factor": 2.0}),
            r"rope_type='yarm' is not known\. Did you mean 'yarn'",
        ),
        (
            lambda: scaling_of({"rope_type": "llama3", "factor": 8.0}),
            "requires original_max_position_embeddings, low_freq",
        ),
        (lambda: scaling_of({"rope_type": "linear", "factor": 2.0, "betafast": 1}), "has no field betafast"),
        (lambda: LongRoPE(short=(), long=(), original_max=1), "original_max must be at least 2, not 1"),
        (
            lambda: rotated(features(), scaling=Short()),
            r"gives rates of shape \(3,\), but 8 rotated features require \(4,\)",
        ),
        (lambda: rotated(features(), scaling=YaRN(factor=2.0, original_max=4), theta=1.0), "requires theta above 1"),
        (lambda: rotated(features(), interleave_sections=True), "interleave_sections=True requires sections"),
        (
            lambda: rotated(features(), sections=(1, 2, 1), interleave_sections=True),
            r"sections=\(1, 2, 1\) cannot alternate: each section except the first gets at most one of 3 pairs",
        ),
        (
            lambda: ax.use("rope", scaling={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6})(tiny_model()),
            "rope_theta would be ignored in a scaling",
        ),
        (lambda: scaling_of({"rope_type": "mrope"}), "rope_type='mrope' requires mrope_section"),
        (lambda: scaling_of({"rope_type": "yarn", "factor": "2"}), "requires original_max_position_embeddings"),
        (lambda: scaling_of({"rope_type": "linear", "factor": "2"}), r"Linear\.factor must be float, not '2'"),
        (
            lambda: from_rope_parameters(
                {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8, "rope_theta": 1e4},
                head_dim=8,
                max_position_embeddings=16,
            ),
            "original_max_position_embeddings=8 and max_position_embeddings=16",
        ),
        (
            lambda: from_rope_parameters({"full_attention": {}, "sliding_attention": {}}, head_dim=8),
            "differ between layer types. Pass the entry of one type: full_attention, sliding_attention",
        ),
        (lambda: from_rope_parameters(None, head_dim=8), "neither rope_parameters nor the config has rope_theta"),
        (lambda: ax.use("rope", skip_every=1)(tiny_model()), "skip_every must be at least 2, not 1"),
        (lambda: rotated(features(), rotary_dim=3), "rotary_dim must be even, positive and at most head_dim=8, not 3"),
        (
            lambda: rotated(features(), rotary_dim=10),
            "rotary_dim must be even, positive and at most head_dim=8, not 10",
        ),
        (lambda: rotated(features(), sections=(1, 2)), r"sections=\(1, 2\) must sum to the 4 pairs"),
        (
            lambda: rotated(features(), scaling=LongRoPE(short=(1.0,), long=(1.0,), original_max=4)),
            r"LongRoPE\.short has 1 factors, but 8 rotated features require 4",
        ),
    ],
)
def test_invalid_values_are_rejected_with_the_requirement(make, message):
    with pytest.raises(ax.ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("feature", "options", "message"),
    [
        ("rope", {}, r"position: positions have 3 coordinates\. RoPE requires a section for each, but .*=None"),
        ("rope", {"sections": (1, 1)}, r"positions have 3 coordinates\. .* sections=\(1, 1\)"),
        ("alibi", {}, r"attention\.bias: positions have 3 coordinates, but ALiBi requires one"),
        (
            "learned-positions",
            {"max_len": 8},
            "position: positions have 3 coordinates, but learned positions require one",
        ),
    ],
)
def test_unsupported_coordinates_are_rejected(feature, options, message):
    cfg = ax.pipe(tiny_model(), ax.use(feature, **options))
    fn, params, state = abstract(cfg)
    with pytest.raises(ax.ConfigError, match=message):
        jax.eval_shape(fn, params, state, tiny_batch()["inputs"], jnp.zeros((2, 8, 3), jnp.int32))


def test_unsupported_scalings_raise_while_building_the_model():
    scaling = LongRoPE(short=(1.0,), long=(1.0,), original_max=4)
    with pytest.raises(
        ax.ConfigError, match=r"attention\.position: LongRoPE\.short has 1 factors, but 4 rotated features"
    ):
        abstract(ax.pipe(tiny_model(), ax.use("rope", scaling=scaling)))


class Short(Scaling):
    def rates(self, theta, rotary_dim, length):
        return np.ones(3)


@pytest.mark.parametrize("old", ["type", "rope_type"])
def test_older_configs_with_a_separate_theta(old):
    cfg = from_rope_parameters({old: "linear", "factor": 4.0}, head_dim=8, theta=5000, partial_rotary_factor=0.5)
    assert cfg == Rotary.Config(theta=5000.0, rotary_dim=4, scaling=Linear(factor=4.0))


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "yarn"}, YaRN(factor=1.0, original_max=64)),
        ({"rope_type": "yarn", "original_max_position_embeddings": 16}, YaRN(factor=4.0, original_max=16)),
        ({"rope_type": "dynamic", "factor": 2.0}, DynamicNTK(factor=2.0, original_max=64)),
        (
            {"type": "su", "short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 16},
            LongRoPE(short=(1.0,), long=(2.0,), original_max=16, factor=4.0),
        ),
        ({"rope_type": "default"}, None),
    ],
)
def test_missing_fields_default_to_max_position_embeddings(parameters, scaling):
    found = from_rope_parameters({"rope_theta": 1e4, **parameters}, head_dim=2, max_position_embeddings=64)
    assert found == Rotary.Config(scaling=scaling)
