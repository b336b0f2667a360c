"""Contract 2: caches return views, every option reaches the kernel, and decoding state is one donated tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.contracts.attention_probes import RoundedKV

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.module import functional
from axcore.nn import (
    Attention,
    BaseAttention,
    Causal,
    CausalLM,
    ContiguousCache,
    FeedForward,
    LatentAttention,
    MultiTokenPrediction,
    Normal,
    Repeat,
    SlidingWindow,
    TransformerLayer,
)
from axcore.testing import tiny_model
from axcore.testing.attention_cases import Slopes
from axcore.testing.models import by_path
from axcore_paged_kv.cache import PagedCache

pytestmark = pytest.mark.long

IDS = jax.random.randint(jax.random.key(4), (2, 11), 0, 32)
TABLE = jnp.asarray([[7, 2, 19, 11], [4, 23, 0, 13]])  # pages of a shared pool, in arbitrary order
EVERY_OPTION = {
    "softcap": 1.5,
    "scale": 0.9,
    "sinks": Normal(stddev=1.0),
    "bias": Slopes.Config(),
    "mask": Causal() & SlidingWindow(size=4),
}


def model(latent=False, **options):
    cfg = ax.select(tiny_model(), "embedding").set(init=Normal(stddev=1.0))
    if latent:
        attention = LatentAttention.Config(
            num_heads=4, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, value_dim=3, absorb_up_to=2
        )
        cfg = ax.select(cfg, Attention).map(lambda _, __: attention)
    return ax.select(cfg, BaseAttention).set(**options)


@pytest.mark.parametrize("unstack", [pytest.param(True, marks=pytest.mark.slow), False], ids=["unstacked", "scanned"])
@pytest.mark.parametrize("latent", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["grouped", "latent"])
def test_decoding_from_int8_pages_equals_a_full_call(latent, unstack):
    cfg = model(latent, **EVERY_OPTION)
    rounded = ax.select(cfg, BaseAttention).set(cache=RoundedKV.Config())
    if latent:  # rounds the latents and absorbs no weights
        rounded = ax.select(rounded, BaseAttention).set(absorb_up_to=0)
    fn, params, state = functional(rounded.build(rngs=ax.Rngs(0)))
    expected = np.asarray(jax.jit(lambda ids: fn(params, state, ids)[0][0])(IDS))

    cache = PagedCache.Config(page_size=4, num_pages=24, dtype="int8")
    decoder, params, state = Decoder.of(
        cfg.build(rngs=ax.Rngs(0)), cache=cache, batch_size=2, max_len=16, unstack=unstack
    )
    step = jax.jit(decoder.__call__, donate_argnums=1)
    # Row 1 is two tokens behind. Row 0 then verifies three draft tokens at once; two of them are rolled back.
    first = Step(IDS[:, :6], jnp.zeros(2, jnp.int32), lengths=jnp.asarray([6, 4]), pages=TABLE)
    logits, state = step(params, state, first)
    np.testing.assert_allclose(logits[0], expected[0, :6], rtol=0, atol=2e-5)
    np.testing.assert_allclose(logits[1, :4], expected[1, :4], rtol=0, atol=2e-5)
    draft = IDS[:1, 6:9].at[0, 1:].set((IDS[0, 7:9] + 5) % 32)
    tried = Step(draft, jnp.asarray([6]), slots=jnp.asarray([0]), pages=TABLE[:1])
    logits, state = step(params, state, tried)
    np.testing.assert_allclose(logits[0, 0], expected[0, 6], rtol=0, atol=2e-5)
    both = Step(jnp.stack([IDS[0, 7:9], IDS[1, 4:6]]), jnp.asarray([7, 4]), pages=TABLE)
    logits, state = step(params, state, both)
    np.testing.assert_allclose(logits, np.stack([expected[0, 7:9], expected[1, 4:6]]), rtol=0, atol=2e-5)
    one = Step(jnp.stack([IDS[0, 9:10], IDS[1, 6:7]]), jnp.asarray([9, 6]), pages=TABLE)
    logits, _ = step(params, state, one)
    np.testing.assert_allclose(logits, np.stack([expected[0, 9:10], expected[1, 6:7]]), rtol=0, atol=2e-5)


def deep(num_layers):
    attention = Attention.Config(num_heads=4, num_kv_heads=2, head_dim=16)
    layer = TransformerLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=24))
    return CausalLM.Config(vocab_size=32, dim=16, decoder=Repeat.Config(num_layers=num_layers, layers=layer))


@pytest.mark.parametrize("unstack", [pytest.param(True, marks=pytest.mark.slow), False], ids=["unstacked", "scanned"])
def test_a_decode_step_needs_little_temporary_memory(unstack):
    decoder, params, state = Decoder.of(
        deep(16).build(rngs=ax.Rngs(0)), cache=ContiguousCache.Config(), batch_size=2, max_len=4096, unstack=unstack
    )
    step = jax.jit(decoder.__call__, donate_argnums=1)
    token = Step(jnp.zeros((2, 1), jnp.int32), jnp.asarray([100, 7]))
    memory = step.lower(params, state, token).compile().memory_analysis()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= held - 64, "the state must be donated and written in place"
    # Unstacked: XLA on CPU copies the keys of one layer into another memory layout for a product.
    most = held / 16 * 1.2 if unstack else 0.01 * held
    assert memory.temp_size_in_bytes < most, f"{memory.temp_size_in_bytes} of {held} bytes"


def test_a_decoder_unstacks_layers_and_drops_prediction_modules():
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=4, num_kv_heads=2), ffn=FeedForward.Config(hidden_dim=24)
    )
    cfg = tiny_model().set(future=(MultiTokenPrediction.Config(layer=layer),))
    sizes = {"batch_size": 2, "max_len": 8, "fuse": False}
    _, params, state = Decoder.of(cfg.build(rngs=ax.Rngs(0)), cache=ContiguousCache.Config(), **sizes)
    paths = by_path(params)
    assert paths["decoder.layers.1.attention.query.weight"].shape == (16, 16)
    assert not any("future" in path for path in [*paths, *by_path(state)])


def test_logits_at_selects_logits_and_invalid_positions_give_nan():
    decoder, params, state = Decoder.of(
        model().build(rngs=ax.Rngs(0)), cache=ContiguousCache.Config(), batch_size=2, max_len=8
    )
    step = jax.jit(decoder.__call__)
    logits, state = step(params, state, Step(IDS[:, :5], jnp.zeros(2, jnp.int32), logits_at=jnp.asarray([[4], [2]])))
    assert logits.shape == (2, 1, 32)
    gap, _ = step(params, state, Step(IDS[:, 6:7], jnp.asarray([6, 5])))
    assert np.isnan(gap[0]).all()
    assert np.isfinite(gap[1]).all()
    beyond, after = step(params, state, Step(IDS[:, :4], jnp.asarray([5, 3])))
    assert np.isnan(beyond[0, 3]).all()
    assert np.isfinite(beyond[0, :3]).all()
    assert after["lengths"].tolist() == [8, 7], "tokens beyond max_len must not count"


def test_decoding_on_a_mesh_equals_one_device():
    from axcore.testing.devices import on_devices

    from . import decode_on_mesh

    found = on_devices(decode_on_mesh.main)
    np.testing.assert_allclose(found["eight"], found["one"], rtol=0, atol=2e-6)
    assert found["cache_shards"] == 8, "rows and kv heads of the cache must be sharded"
