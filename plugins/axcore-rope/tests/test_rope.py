"""Rotary embedding against complex multiplication in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TokenInfo, TransformerLayer
from axcore_rope.feature import use_rope
from axcore_rope.rotary import Rotary

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 2, 5, 4, 2, 6
POSITIONS = np.array([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]], np.int32)  # two documents in each row


def features(seed, count, seq=SEQ, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=(BATCH, seq, count, HEAD_DIM)).astype(dtype)


def turned(x, positions, theta=10_000.0):
    """Pairs features i and i + d / 2 as complex numbers and multiplies each by exp(1j * position * rate)."""
    x, half = x.astype(np.float64), x.shape[-1] // 2
    numbers = x[..., :half] + 1j * x[..., half:]
    rates = np.array([theta ** (-2 * pair / x.shape[-1]) for pair in range(half)])
    numbers = numbers * np.exp(1j * np.asarray(positions, np.float64)[:, :, None, None] * rates)
    return np.concatenate([numbers.real, numbers.imag], axis=-1)


def rotate(q, k, query_positions, key_positions, **options):
    rotary = Rotary.Config(head_dim=q.shape[-1], **options).build(rngs=ax.Rngs(0))
    return jax.jit(lambda *arrays: rotary(*arrays))(q, k, query_positions, key_positions)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 2.0])
def test_matches_complex_multiplication(theta):
    q, k = features(0, HEADS), features(1, KV_HEADS)
    positions = np.arange(SEQ)[None]
    new_q, new_k = rotate(q, k, positions, positions, theta=theta)
    np.testing.assert_allclose(new_q, turned(q, positions, theta), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(new_k, turned(k, positions, theta), rtol=1e-5, atol=1e-5)


def test_default_theta():
    assert Rotary.Config().theta == 10_000.0


def test_packed_rows_use_positions_within_documents():
    q, k = features(0, HEADS), features(1, KV_HEADS)
    new_q, new_k = rotate(q, k, POSITIONS, POSITIONS)
    np.testing.assert_allclose(new_q, turned(q, POSITIONS), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(new_k, turned(k, POSITIONS), rtol=1e-5, atol=1e-5)


def test_queries_and_keys_have_separate_positions():
    q, k = features(0, HEADS, seq=1), features(1, KV_HEADS)
    new_q, new_k = rotate(q, k, np.full((1, 1), 7), np.arange(SEQ)[None])
    np.testing.assert_allclose(new_q, turned(q, np.full((1, 1), 7)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(new_k, turned(k, np.arange(SEQ)[None]), rtol=1e-5, atol=1e-5)


def test_position_zero_is_the_identity_and_norms_are_kept():
    q, k = features(0, HEADS), features(1, KV_HEADS)
    zeros = np.zeros((1, SEQ), np.int32)
    np.testing.assert_array_equal(rotate(q, k, zeros, zeros)[0], q)
    new_q, _ = rotate(q, k, POSITIONS, POSITIONS)
    np.testing.assert_allclose(np.linalg.norm(new_q, axis=-1), np.linalg.norm(q, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("shift", [1, 100, 4000])
def test_scores_depend_only_on_the_distance(shift):
    q, k = features(0, 1), features(1, 1)
    positions = np.arange(SEQ)[None]

    def scores(offset):
        new_q, new_k = rotate(q, k, positions + offset, positions + offset)
        return np.einsum("bsnd,btnd->bst", np.asarray(new_q, np.float64), np.asarray(new_k, np.float64))

    # float32 angles of up to 4000 radians carry an error of 4000 * 2**-24 = 2.4e-4
    np.testing.assert_allclose(scores(shift), scores(0), atol=1e-5 + 3 * shift * 2.0**-22)
    assert np.abs(scores(0) - np.einsum("bsnd,btnd->bst", q, k)).max() > 0.1


def test_far_positions_have_float32_angle_precision():
    q, k = features(0, HEADS, seq=1), features(1, KV_HEADS, seq=1)
    far = np.full((1, 1), 100_000)
    np.testing.assert_allclose(rotate(q, k, far, far)[0], turned(q, far), atol=100_000 * 2.0**-22)


def test_bfloat16_input_is_rotated_in_float32():
    q, k = features(0, HEADS, dtype=jnp.bfloat16), features(1, KV_HEADS, dtype=jnp.bfloat16)
    positions = np.arange(1000, 1000 + SEQ)[None]  # bfloat16 could not tell these apart
    new_q, new_k = rotate(q, k, positions, positions)
    assert new_q.dtype == new_k.dtype == jnp.bfloat16
    assert (new_q.shape, new_k.shape) == (q.shape, k.shape)
    np.testing.assert_allclose(np.asarray(new_q, np.float64), turned(q, positions), rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize("head_dim", [1, 5])
def test_odd_head_dim_raises(head_dim):
    with pytest.raises(ax.ConfigError, match=rf"head_dim must be even, not {head_dim}"):
        Rotary.Config(head_dim=head_dim).build(rngs=ax.Rngs(0))


def model(num_heads=2, dim=8):
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=num_heads), ffn=FeedForward.Config(hidden_dim=8)
    )
    return CausalLM.Config(vocab_size=7, dim=dim, decoder=Repeat.Config(num_layers=2, layers=layer))


def test_feature_fills_the_position_slot_of_every_attention():
    cfg = use_rope(model(), theta=500.0)
    assert cfg.decoder.layers.attention.position == Rotary.Config(theta=500.0)
    assert model().decoder.layers.attention.position is None
    assert ax.use("rope", theta=500.0)(model()) == cfg
    with pytest.raises(ax.ConfigError, match="nothing in the config matches"):
        use_rope(model(), where="no.such.path")


def test_odd_head_dim_error_names_the_path():
    with pytest.raises(ax.ConfigError, match=r"^decoder\.layers\.attention\.position: RoPE .*even, not 3"):
        abstract(use_rope(model(num_heads=2, dim=6)))


def test_attention_rotates_queries_and_keys():
    cfg = Attention.Config(input_dim=8, num_heads=2, num_kv_heads=1, position=Rotary.Config())
    fn, shapes, _ = abstract(cfg)
    assert "position" not in shapes  # no parameters
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype), shapes)
    x = random.normal(size=(BATCH, SEQ, 8)).astype(np.float32)
    segments = np.array([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]], np.int32)

    tokens = TokenInfo(np.arange(SEQ, dtype=np.int32)[None], POSITIONS, segments)
    found = jax.jit(lambda params: fn(params, {}, x, tokens)[0][0])(params)
    p = {name: np.asarray(part["weight"], np.float64) for name, part in params.items()}
    q = turned((x @ p["query"]).reshape(BATCH, SEQ, 2, 4), POSITIONS)
    k = turned((x @ p["key"]).reshape(BATCH, SEQ, 1, 4), POSITIONS)[:, :, 0]
    v = x @ p["value"]
    out = np.zeros((BATCH, SEQ, 2, 4))
    for b in range(BATCH):
        for i in range(SEQ):
            seen = [t for t in range(i + 1) if segments[b, t] == segments[b, i]]
            for h in range(2):
                weights = np.exp([q[b, i, h] @ k[b, t] / 2 for t in seen])
                out[b, i, h] = (weights / weights.sum()) @ v[b, seen]
    np.testing.assert_allclose(found, out.reshape(BATCH, SEQ, 8) @ p["projection"], rtol=1e-4, atol=1e-4)
