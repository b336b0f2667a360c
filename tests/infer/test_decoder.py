"""Invalid arguments of `Decoder` and `Step`, models that already have caches, and the dtypes of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.module import abstract, functional
from axcore.nn import (
    Attention,
    ContiguousCache,
    KVCache,
    Linear,
    ReferenceKernel,
    Repeat,
    Sequence,
    for_decoding,
    without_caches,
)
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.models import by_path

IDS = tiny_batch()["inputs"]
START = jnp.zeros((2,), jnp.int32)


def decoder_of(cfg):
    """(compiled decoder, params, state) of a model, for two rows of eight tokens."""
    decoder, *trees = Decoder.of(cfg.build(rngs=ax.Rngs(0)), cache=ContiguousCache.Config(), batch_size=2, max_len=8)
    return jax.jit(decoder), *trees


@pytest.fixture(scope="module")
def tiny_decoder():
    """Shared by all tests, so that it compiles once. No test changes its state in place."""
    return decoder_of(tiny_model())


def test_existing_caches_are_resized_for_the_decoder(tiny_decoder):
    filled = ax.select(tiny_model(), Attention).set(cache=ContiguousCache.Config(batch_size=1, max_len=3))
    decoder, params, state = decoder_of(filled)
    plain, _, empty = tiny_decoder
    step = Step(IDS, START)
    np.testing.assert_array_equal(decoder(params, state, step)[0], plain(params, empty, step)[0])


def test_the_state_of_a_model_is_copied():
    """An engine donates its state, and another may use the same model."""
    cfg = tiny_model()
    moe = ax.use("moe", num_experts=2)(cfg.set(decoder=Sequence.Config(layers=(cfg.decoder.layers,))))
    model = moe.build(rngs=ax.Rngs(0))
    for _ in range(2):
        for leaf in jax.tree.leaves(Decoder.of(model, cache=ContiguousCache.Config(), batch_size=2, max_len=8)[2]):
            leaf.delete()
    held = jax.tree.leaves(functional(model)[2])
    assert held and not any(leaf.is_deleted() for leaf in held)


def test_equal_layers_of_a_step_are_traced_once():
    calls = []

    class Counted(ReferenceKernel):
        def __call__(self, inputs):
            calls.append(self.frame.path)
            return super().__call__(inputs)

    cfg = ax.select(tiny_model(), Attention).set(kernel=Counted.Config())
    cfg = ax.select(cfg, Repeat).set(num_layers=5)
    options = {"cache": ContiguousCache.Config(), "batch_size": 2, "max_len": 8}
    decoder, params, state = Decoder.abstract(cfg, **options)
    jax.eval_shape(decoder, params, state, Step(IDS, START))
    assert calls == ["decoder.layers.0.attention.kernel"]


@pytest.mark.parametrize("size", ["batch_size", "max_len"])
def test_case_a_given_cache_of_another_size_is_refused(size):
    cache = ContiguousCache.Config(**{size: 3})
    with pytest.raises(ax.ConfigError, match=rf"{size}=3 is set on .*ContiguousCache, but its parent passes {size}="):
        for_decoding(tiny_model(), batch_size=2, max_len=8, cache=cache)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ids": IDS[:, :0]}, r"ids must be \[batch, width\] with at least one row and one token, got shape \(2, 0\)"),
        ({"ids": IDS[0]}, r"ids must be \[batch, width\] with at least one row and one token"),
        ({"start": START[:1]}, r"start must have shape \(2,\), one number for each row; got shape \(1,\)"),
        ({"lengths": jnp.ones((2, 1), jnp.int32)}, r"lengths must have shape \(2,\)"),
        ({"slots": jnp.arange(3)}, r"slots must have shape \(2,\)"),
        ({"logits_at": START}, r"logits_at must be \[batch, ...\] with two dimensions, got shape \(2,\)"),
    ],
    ids=["no token", "ids of one dimension", "start", "lengths", "slots", "logits_at"],
)
def test_a_step_of_invalid_shape_raises(changes, told):
    with pytest.raises(ax.ConfigError, match=rf"Step\.{told}"):
        Step(**{"ids": IDS, "start": START} | changes)


@pytest.mark.parametrize("place", [-1, 8])
def test_a_position_outside_the_row_gives_nan_and_is_not_stored(tiny_decoder, place):
    decoder, params, state = tiny_decoder
    logits, after = decoder(params, state, Step(IDS[:, :1], jnp.full((2,), place, jnp.int32)))
    assert np.isnan(logits).all()
    caches = {path: array for path, array in by_path(after["model"]).items() if "cache" in path}
    assert len(caches) == 4  # keys and values of two layers
    assert not any(array.any() for array in caches.values())


def test_a_step_after_a_gap_gives_nan_and_a_rollback_does_not(tiny_decoder):
    decoder, params, state = tiny_decoder
    expected, state = decoder(params, state, Step(IDS[:, :4], START))
    gap, _ = decoder(params, state, Step(IDS[:, 5:6], START + 5))
    again, _ = decoder(params, state, Step(IDS[:, 2:4], START + 2))
    assert np.isnan(gap).all()
    np.testing.assert_allclose(again, expected[:, 2:], rtol=0, atol=1e-5)


def test_a_model_without_decoding_state_raises():
    with pytest.raises(ax.ConfigError, match="requires a model that was built from a config, got Linear"):
        Decoder.of(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), cache=ContiguousCache.Config(), batch_size=1, max_len=2)
    layer = Linear.Config(input_dim=2, output_dim=2).build(rngs=ax.Rngs(0))
    with pytest.raises(ax.ConfigError, match="no layer of Linear has decoding state"):
        Decoder.of(layer, cache=ContiguousCache.Config(), batch_size=1, max_len=2)


def test_case_a_cache_in_the_config_is_used_only_for_decoding(tiny_decoder):
    """`use("contiguous")`, as `axcore explain` advises: training ignores the cache, and the decoder sizes it."""
    cfg = ax.pipe(tiny_model(), ax.use("contiguous"))
    assert abstract(cfg)[1:] == abstract(tiny_model())[1:]
    state = Decoder.of(cfg.build(rngs=ax.Rngs(0)), cache=Unused.Config(), batch_size=2, max_len=8)[2]
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, tiny_decoder[2])
    assert without_caches(cfg) == tiny_model()


class Unused(KVCache):
    """A cache that no slot is left for."""


SLOT_0 = jnp.asarray([0])


def row(ids, start, **more):
    return Step(ids[:1], jnp.asarray([start]), **{"slots": SLOT_0} | more)


def test_logits_after_a_gap_are_nan_until_the_row_is_complete(tiny_decoder):
    decoder, params, state = tiny_decoder
    expected, _ = decoder(params, state, row(IDS[:, :6], 0))
    _, state = decoder(params, state, row(IDS[:, :2], 0))
    gap, state = decoder(params, state, row(IDS[:, 4:5], 4))
    after, state = decoder(params, state, row(IDS[:, 5:6], 5))
    assert np.isnan(gap).all() and np.isnan(after).all()
    assert state["lengths"].tolist() == [2, 0]
    filled, _ = decoder(params, state, row(IDS[:, 2:6], 2))
    np.testing.assert_allclose(filled, expected[:, 2:], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "step",
    [
        row(IDS[:, :3], 0, lengths=jnp.asarray([5])),
        row(IDS[:, :3], 0, lengths=jnp.asarray([-1])),
        row(IDS[:, :3], -1),
        row(IDS[:, :3], 0, slots=jnp.asarray([2])),
        row(IDS[:, :3], 0, slots=jnp.asarray([-1])),
        Step(IDS[:, :3], jnp.zeros(2, jnp.int32), slots=jnp.asarray([1, 1])),
    ],
    ids=[
        "longer than the width",
        "negative length",
        "negative start",
        "no such slot",
        "negative slot",
        "one slot twice",
    ],
)
def test_an_invalid_step_gives_nan_and_does_not_change_rows(tiny_decoder, step):
    decoder, params, state = tiny_decoder
    _, state = decoder(params, state, Step(IDS[:, :4], START))
    expected, _ = decoder(params, state, Step(IDS[:, 4:5], START + 4))
    logits, after = decoder(params, state, step)
    assert np.isnan(logits).all()
    assert after["lengths"].tolist() == [4, 4]
    if step.slots is not None and (step.lengths is None):
        np.testing.assert_array_equal(decoder(params, after, Step(IDS[:, 4:5], START + 4))[0], expected)


def test_logits_at_padding_are_nan(tiny_decoder):
    decoder, params, state = tiny_decoder
    at = jnp.asarray([[1, 2, -1, 9]])
    logits, _ = decoder(params, state, row(IDS[:, :4], 0, lengths=jnp.asarray([2]), logits_at=at))
    assert np.isnan(logits).all(axis=-1).tolist() == [[False, True, True, True]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ids": IDS * 1.0}, "Step.ids must have an integer dtype, not float32"),
        ({"start": 0}, "Step.start must be an array, not 0"),
        ({"lengths": jnp.ones(2)}, "Step.lengths must have an integer dtype"),
        ({"phase": "prefil"}, "Step.phase must be 'prefill', 'decode' or None"),
        ({"pages": jnp.zeros(2, jnp.int32)}, r"Step.pages must be \[batch, ...\]"),
    ],
)
def test_invalid_steps_raise(wrong, said):
    with pytest.raises(ax.ConfigError, match=said):
        Step(**{"ids": IDS, "start": START} | wrong)


@pytest.mark.long
def test_weights_are_stored_in_the_compute_dtype():
    """A step then reads half of the bytes, and its results do not change."""
    cfg = tiny_model().set(dtypes=ax.DTypes(compute="bfloat16"))
    cfg = ax.select(cfg, "decoder.layers.attention.value").set(dtypes=ax.DTypes(compute="float32"))
    model = cfg.build(rngs=ax.Rngs(0))
    given = {"cache": ContiguousCache.Config(), "batch_size": 2, "max_len": 8}
    decoder, params, state = Decoder.of(model, **given, unstack=False, fuse=False)
    _, shapes, _ = Decoder.abstract(cfg, **given, unstack=False, fuse=False)
    assert jax.tree.map(lambda x: x.dtype, params) == jax.tree.map(lambda x: x.dtype, shapes)
    dtypes = {path: leaf.dtype.name for path, leaf in by_path(params).items()}
    assert dtypes["decoder.layers.attention.query.weight"] == dtypes["embedding.weight"] == "bfloat16"
    assert dtypes["decoder.layers.attention.value.weight"] == dtypes["norm.scale"] == "float32"
    step, original = Step(IDS, START), functional(model)[1]
    decoder = jax.jit(decoder)
    np.testing.assert_array_equal(decoder(params, state, step)[0], decoder(original, state, step)[0])
