"""Rollback, gaps, masks, memory, and models in which only some layers have a window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.module import functional
from axcore.nn import Attention, Causal, ContiguousCache, Full, Normal, Prefix, SlidingWindow, without_caches
from axcore.testing import tiny_model
from axcore.testing.models import by_path
from axcore_ring_kv.cache import RingCache
from axcore_ring_kv.reach import reach

IDS = jax.random.randint(jax.random.key(4), (2, 12), 0, 32)
RING = RingCache.Config(window=4, spare=2)


def model(*features):
    cfg = ax.select(tiny_model(), "embedding").set(init=Normal(stddev=1.0))
    return ax.pipe(cfg, *(features or (ax.use("sliding-window", size=4),)))


def recomputed(cfg):
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    return np.asarray(jax.jit(lambda ids: fn(params, state, ids)[0][0])(IDS))


@pytest.fixture(scope="module")
def ring():
    """(compiled decoder, parameters, state, logits of whole rows)."""
    decoder, params, state = Decoder.of(model().build(rngs=ax.Rngs(0)), cache=RING, batch_size=2, max_len=12)
    return jax.jit(decoder.__call__), params, state, recomputed(model())


def at(start, count, ids=IDS):
    return Step(ids[:, start : start + count], jnp.full((2,), start, jnp.int32))


@pytest.mark.long
@pytest.mark.parametrize("prompt", [8, 5], ids=["long step", "short steps"])
def test_rolling_back_further_than_spare_gives_nan_until_the_row_starts_again(ring, prompt):
    step, params, state, expected = ring
    wrong = (IDS + 1) % 32
    _, state = step(params, state, at(0, prompt))
    for start in range(prompt, 8):
        _, state = step(params, state, at(start, 1, wrong))
    for start in range(2, 9):
        lost, state = step(params, state, at(start, 1))
        assert np.isnan(lost).all(), "a row that lost keys must not give numbers"
    for start, count in ((0, 2), (2, 5)):
        again, state = step(params, state, at(start, count))
        np.testing.assert_allclose(again, expected[:, start : start + count], rtol=0, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("back", [1, 2, 3])
def test_spare_tokens_can_be_rolled_back(ring, back):
    step, params, state, expected = ring
    _, state = step(params, state, at(0, 9 - back))
    _, state = step(params, state, at(9 - back, back, (IDS + 1) % 32))
    for start in range(9 - back, 11):
        logits, state = step(params, state, at(start, 1))
        np.testing.assert_allclose(logits, expected[:, start : start + 1], rtol=0, atol=2e-5)


def test_a_step_after_a_gap_overwrites_nothing(ring):
    step, params, state, expected = ring
    _, state = step(params, state, at(0, 5))
    gap, after = step(params, state, at(9, 1))
    assert np.isnan(gap).all()
    logits, _ = step(params, after, at(5, 1))
    np.testing.assert_allclose(logits, expected[:, 5:6], rtol=0, atol=2e-5)


@pytest.mark.long
def test_tokens_beyond_max_len_overwrite_nothing(ring):
    step, params, state, expected = ring
    _, state = step(params, state, at(0, 11))
    beyond, state = step(params, state, Step(IDS[:, :3], jnp.full((2,), 11, jnp.int32)))
    assert np.isfinite(beyond[:, 0]).all() and np.isnan(beyond[:, 1:]).all()
    logits, _ = step(params, state, at(10, 2))
    np.testing.assert_allclose(logits, expected[:, 10:], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "unstack",
    [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.long)],
    ids=["unstacked", "scanned"],
)
def test_only_layers_with_a_window_have_a_ring(unstack):
    """Prompts are longer than window and ring, and row 1 is two tokens behind."""
    windows = (ax.use("sliding-window", size=3, global_every=2), ax.use("ring-kv", spare=1))
    cfg = model(lambda cfg: ax.select(cfg, "decoder").set(num_layers=4), *windows)
    expected = recomputed(without_caches(cfg))
    decoder, params, state = Decoder.of(
        cfg.build(rngs=ax.Rngs(0)), cache=ContiguousCache.Config(), batch_size=2, max_len=12, unstack=unstack
    )
    sizes = {array.shape[-3] for path, array in by_path(state["model"]).items() if path.endswith("keys")}
    assert sizes == {4, 12}
    step, lengths = jax.jit(decoder.__call__, donate_argnums=1), np.asarray([8, 6])
    prompt = Step(IDS[:, :8], jnp.zeros(2, jnp.int32), lengths=jnp.asarray(lengths))
    logits, state = step(params, state, prompt)
    for row, count in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :count], expected[row, :count], rtol=0, atol=2e-5)
    for _ in range(3):
        token = jnp.stack([IDS[row, start : start + 1] for row, start in enumerate(lengths)])
        logits, state = step(params, state, Step(token, jnp.asarray(lengths)))
        wanted = np.stack([expected[row, start : start + 1] for row, start in enumerate(lengths)])
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-5)
        lengths = lengths + 1


def test_the_feature_takes_the_window_of_each_mask():
    layers = ax.nn.unstacked(tiny_model())
    one = ax.select(layers, "decoder.layers.0.attention").set(mask=Causal() & SlidingWindow(size=5))
    cfg = ax.use("ring-kv", spare=3, dtype="int8")(one)
    found = [node.cache for _, node in ax.config.walk(cfg) if isinstance(node, Attention.Config)]
    assert found == [RingCache.Config(window=5, spare=3, dtype="int8"), None]
    with pytest.raises(ax.ConfigError, match="no selected attention has a sliding window"):
        ax.use("ring-kv")(tiny_model())


def test_a_mask_beyond_the_window_raises():
    wide = model(ax.use("sliding-window", size=5))
    for cfg, seen in ((tiny_model(), "all earlier tokens"), (wide, "5 tokens")):
        decoder, params, state = Decoder.abstract(cfg, cache=RING, batch_size=2, max_len=12)
        with pytest.raises(ax.ConfigError, match=rf"cache: window=4, but a query sees {seen}"):
            jax.eval_shape(decoder, params, state, at(0, 2))


def test_reach_of_masks():
    window = SlidingWindow(size=3)
    assert reach(Causal() & window & SlidingWindow(size=7)) == 3
    assert reach(window | (SlidingWindow(size=7) & Causal())) == 7
    assert reach(window | Prefix(size=2)) is None
    assert reach(Full() & Causal()) is None
