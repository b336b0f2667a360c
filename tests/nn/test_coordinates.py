"""Positions with several coordinates, as in an image: [batch, seq, coordinates]."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import (
    Attention,
    CachedRows,
    CausalLM,
    ContiguousCache,
    FeedForward,
    LatentAttention,
    ReferenceKernel,
    Repeat,
    TokenInfo,
    TransformerLayer,
)
from axcore.parallel import Remat
from axcore.testing import tiny_batch

from . import reference
from .support import call, minimized, parameters, wide

pytestmark = pytest.mark.long

BATCH, SEQ, DIM, HEADS = 2, 8, 6, 2
COORDINATES = np.random.default_rng(0).integers(0, 5, (BATCH, SEQ, 3)).astype(np.int32)
TOKENS = TokenInfo(np.arange(SEQ, dtype=np.int32)[None], COORDINATES)
PLACES = jnp.arange(SEQ, dtype=jnp.int32)[None]
X = np.random.default_rng(3).normal(size=(BATCH, SEQ, DIM)).astype(np.float32)


class Move(ax.Layer):
    """Adds each of three coordinates to one feature of queries and keys."""

    class Config(ax.Layer.Config):
        head_dim: int = ax.REQUIRED

    def __init__(self, cfg, *, rngs):
        assert cfg.head_dim == 3

    def __call__(self, q, k, query_positions, key_positions):
        assert query_positions.shape[2:] == key_positions.shape[2:] == (3,)
        return q + 0.1 * query_positions[:, :, None], k + 0.1 * key_positions[:, :, None]


def attention(chunk=1024, **changes):
    kernel = ReferenceKernel.Config(chunk=chunk)
    return Attention.Config(num_heads=HEADS, position=Move.Config(), kernel=kernel, **changes)


def by_formula(params):
    p, x = wide(params), X.astype(np.float64)
    q, k, v = ((x @ p[name]["weight"]).reshape(BATCH, SEQ, HEADS, 3) for name in ("query", "key", "value"))
    steps = 0.1 * COORDINATES[:, :, None]
    out = reference.attend(q + steps, k + steps, v, reference.causal(BATCH, SEQ))
    return out.reshape(BATCH, SEQ, -1) @ p["projection"]["weight"]


@pytest.mark.parametrize("chunk", [1024, 3])
def test_the_position_slot_receives_all_coordinates(chunk):
    cfg = attention(chunk, input_dim=DIM)
    params = parameters(cfg)
    np.testing.assert_allclose(call(cfg, params, X, TOKENS)[0], by_formula(params), rtol=1e-4, atol=1e-5)


def test_a_cache_stores_keys_after_the_position_embedding():
    cfg = attention(input_dim=DIM)
    params = parameters(cfg)
    fn, _, state = abstract(cfg.set(cache=ContiguousCache.Config(batch_size=BATCH, max_len=SEQ)))
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    step, found = jax.jit(fn), []
    for start, stop in ((0, 5), (5, 6), (6, 8)):
        rows = CachedRows(TokenInfo(PLACES, PLACES, valid=stop > PLACES), jnp.full((BATCH,), stop))
        tokens = TokenInfo(TOKENS.index[:, start:stop], COORDINATES[:, start:stop], cached=rows)
        (heads, _), state = step(params, state, X[:, start:stop], tokens)
        found.append(heads)
    np.testing.assert_allclose(np.concatenate(found, axis=1), by_formula(params), rtol=1e-4, atol=1e-5)


def model(part, remat=None):
    layer = TransformerLayer.Config(attention=part, ffn=FeedForward.Config(hidden_dim=8))
    return CausalLM.Config(vocab_size=32, dim=DIM, decoder=Repeat.Config(num_layers=2, layers=layer, remat=remat))


PARTS = {
    "grouped": attention(),
    "latent": LatentAttention.Config(
        num_heads=HEADS, kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=3, value_dim=3, position=Move.Config()
    ),
}


@pytest.mark.parametrize("part", ["grouped", pytest.param("latent", marks=pytest.mark.slow)])
def test_a_scanned_model_with_remat_trains_on_packed_positions(part):
    plain, saving = model(PARTS[part]), model(PARTS[part], Remat())
    params = parameters(plain, scale=0.3)
    batch = tiny_batch() | {"positions": COORDINATES}

    def compiled(cfg):
        return jax.jit(jax.value_and_grad(minimized(cfg)))

    run = compiled(saving)
    expected, found = compiled(plain)(params, batch), run(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)
    assert abs(run(params, batch | {"positions": COORDINATES[:, ::-1]})[0] - expected[0]) > 1e-5
