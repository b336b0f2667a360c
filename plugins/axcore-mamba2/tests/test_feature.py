"""Which layers the feature replaces, and decoding with a whole model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.module import abstract, initializer
from axcore.nn import Attention, CausalLM, ContiguousCache, FeedForward, Repeat, Sequence, TransformerLayer, layers_of
from axcore.testing import tiny_batch, tiny_model
from axcore_mamba2.feature import use_mamba2
from axcore_mamba2.mixer import Mamba2

pytestmark = pytest.mark.long

LAYER = TransformerLayer.Config(attention=Attention.Config(num_heads=2), ffn=FeedForward.Config(hidden_dim=8))
OPTIONS = {"head_dim": 4, "state_dim": 3}


def model(decoder):
    return CausalLM.Config(vocab_size=7, dim=8, decoder=decoder)


def kinds(decoder):
    return [type(place.config.attention).target.__name__ for place in layers_of(decoder)]


def test_replaces_every_attention_and_keeps_shared_fields():
    types = ax.DTypes(compute="bfloat16")
    cfg = ax.select(model(Repeat.Config(num_layers=2, layers=LAYER)), Attention).set(tags=("mixer",), dtypes=types)
    found = ax.use("mamba2", chunk=16, **OPTIONS)(cfg).decoder.layers
    assert found.attention == Mamba2.Config(head_dim=4, state_dim=3, chunk=16, tags=("mixer",), dtypes=types)
    assert found.ffn == LAYER.ffn
    with pytest.raises(ax.ConfigError, match="nothing in the config matches"):
        use_mamba2(cfg, where="no.such.path")


def test_hybrid_keeps_attention_in_the_last_layer_of_each_group():
    cfg = use_mamba2(model(Repeat.Config(num_layers=6, layers=LAYER)), attention_every=3, **OPTIONS)
    assert cfg.decoder.num_layers == 2
    assert kinds(cfg.decoder.layers) == ["Mamba2", "Mamba2", "Attention"]
    assert cfg.decoder.layers.layers[2] == LAYER


def test_hybrid_of_a_sequence_of_layers():
    cfg = use_mamba2(model(Sequence.Config(layers=(LAYER,) * 5)), attention_every=2, **OPTIONS)
    assert kinds(cfg.decoder) == ["Mamba2", "Attention", "Mamba2", "Attention", "Mamba2"]


def test_only_stacks_with_selected_layers_are_grouped():
    stacks = model(Sequence.Config(layers=(Repeat.Config(num_layers=3, layers=LAYER),) * 2))
    cfg = use_mamba2(stacks, attention_every=3, where="decoder.layers.1.**.attention", **OPTIONS)
    assert cfg.decoder.layers[0] == stacks.decoder.layers[0]
    assert kinds(cfg.decoder.layers[1]) == ["Mamba2", "Mamba2", "Attention"]


def test_attention_every_one_is_rejected():
    with pytest.raises(ax.ConfigError, match="attention_every must be at least 2, not 1"):
        use_mamba2(model(Repeat.Config(num_layers=6, layers=LAYER)), attention_every=1)


def test_hybrid_with_an_incomplete_last_group():
    cfg = use_mamba2(model(Repeat.Config(num_layers=5, layers=LAYER)), attention_every=2, **OPTIONS)
    assert kinds(cfg.decoder) == ["Mamba2", "Attention", "Mamba2", "Attention", "Mamba2"]


def test_hybrid_decoding_matches_the_full_pass():
    cfg = use_mamba2(model(Repeat.Config(num_layers=4, layers=LAYER)), attention_every=2, **OPTIONS)
    lm = abstract(cfg)[0].bind(*jax.jit(initializer(cfg))(jax.random.key(0)))
    ids = np.random.default_rng(0).integers(0, 7, (2, 9)).astype(np.int32)
    decoder, params, state = Decoder.of(lm, cache=ContiguousCache.Config(), batch_size=2, max_len=9)
    step, found = jax.jit(decoder.__call__), []
    for place in range(9):
        logits, state = step(params, state, Step(ids[:, place : place + 1], np.full((2,), place, np.int32)))
        found.append(logits)
    wanted = jax.jit(lambda ids: ax.invoke(lm, ids)[0])(ids)
    np.testing.assert_allclose(np.concatenate(found, axis=1), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_going_back_or_skipping_tokens_gives_nan():
    cfg = ax.pipe(tiny_model(), ax.use("mamba2", state_dim=4, head_dim=4, chunk=4))
    decoder, params, state = Decoder.of(
        cfg.build(rngs=ax.Rngs(0)), cache=ContiguousCache.Config(), batch_size=2, max_len=8
    )
    ids, start = tiny_batch()["inputs"], jnp.zeros((2,), jnp.int32)
    expected, state = decoder(params, state, Step(ids[:, :3], start))
    gone_back, _ = decoder(params, state, Step(ids[:, 1:4], start + 1))
    skipped, _ = decoder(params, state, Step(ids[:, 4:], start + 4))
    again, _ = decoder(params, state, Step(ids[:, :3], start))
    assert np.isnan(gone_back).all() and np.isnan(skipped).all()
    np.testing.assert_allclose(again, expected, rtol=1e-5, atol=1e-6)
