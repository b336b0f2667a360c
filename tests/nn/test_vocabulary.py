"""Embedding scale, learned positions, tied heads, logit scale, final softcap and padded vocabularies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import Attention, CausalLM, Embedding, FeedForward, Linear, Normal, Repeat, Sequence, TransformerLayer

from . import reference
from .support import call, layer_of, minimized, parameters, score, shapes, wide

pytestmark = pytest.mark.long

VOCAB, DIM, HEADS = 7, 4, 2
LAYER = TransformerLayer.Config(attention=Attention.Config(num_heads=HEADS), ffn=FeedForward.Config(hidden_dim=6))
IDS = np.array([[1, 5, 0, 6, 2], [3, 3, 4, 1, 0]], np.int32)
BATCH = {
    "inputs": IDS,
    "targets": np.roll(IDS, 1, axis=1),
    "weights": np.array([[1, 0, 1, 2, 0.5], [0, 0, 1, 1, 1]], np.float32),
}


def model(**options):
    decoder = Repeat.Config(num_layers=1, layers=LAYER)
    return CausalLM.Config(**{"vocab_size": VOCAB, "dim": DIM, "decoder": decoder} | options)


def by_formula(params, embed=lambda x: x, ids=IDS):
    """Logits in float64, from embeddings changed by `embed`."""
    p = wide(params)
    x = embed(p["embedding"]["weight"][ids])
    x = reference.transformer_layer(x, layer_of(p["decoder"]["layers"], 0), HEADS, HEADS, reference.causal(*ids.shape))
    x = reference.rms_norm(x, p["norm"]["scale"])
    return x @ (p["head"]["weight"] if "head" in p else p["embedding"]["weight"].T)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_the_embedding_scale_does_not_apply_to_a_tied_head(tied):
    cfg = model(embedding=Embedding.Config(scale=3.0), **({"head": None} if tied else {}))
    params = parameters(cfg)
    np.testing.assert_allclose(call(cfg, params, IDS)[0], by_formula(params, lambda x: 3.0 * x), rtol=1e-4, atol=1e-5)


def test_the_embedding_scale_is_rounded_to_the_compute_dtype():
    """As in the published code of Gemma."""
    cfg = Embedding.Config(vocab_size=VOCAB, output_dim=DIM, scale=55.4256, dtypes=ax.DTypes(compute="bfloat16"))
    params = {"weight": np.ones((VOCAB, DIM), np.float32)}
    output = call(cfg, params, IDS)[0]
    assert output.dtype == jnp.bfloat16
    np.testing.assert_array_equal(output.astype(np.float32), np.full((2, 5, DIM), 55.5, np.float32))


class Learned(ax.Layer):
    """Adds a learned vector for each position."""

    class Config(ax.Layer.Config):
        input_dim: int = ax.REQUIRED

    def __init__(self, cfg, *, rngs):
        self.weight = self.param("weight", (9, cfg.input_dim), Normal(), rngs, axes=(None, "embed"))

    def __call__(self, x, positions):
        return x + self.weight[...][positions]


def test_the_position_slot_receives_embeddings_and_positions():
    cfg = model(position=Learned.Config())
    params = parameters(cfg)
    positions = np.array([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]], np.int32)
    table = wide(params)["position"]["weight"]
    found = jax.jit(lambda params: shapes(cfg)[0](params, {}, IDS, positions)[0][0])(params)
    np.testing.assert_allclose(found, by_formula(params, lambda x: x + table[positions]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        call(cfg, params, IDS)[0], by_formula(params, lambda x: x + table[np.arange(5)]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_the_scale_and_then_the_softcap_apply_to_the_logits_also_of_the_loss(tied):
    cfg = model(logit_scale=0.25, softcap=0.5, **({"head": None} if tied else {}))
    params = parameters(cfg, scale=1.0)
    raw = by_formula(params)
    assert np.abs(raw).max() > 0.5
    capped = 0.5 * np.tanh(0.25 * raw / 0.5)
    np.testing.assert_allclose(call(cfg, params, IDS)[0], capped, rtol=1e-4, atol=1e-5)
    loss, added = score(cfg, params, BATCH, z_loss=0.1)
    expected, z_loss = reference.objective(capped, BATCH["targets"], BATCH["weights"], 0.1)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(added["z_loss"], z_loss, rtol=1e-5)


def padded_params(params, rows):
    """The same tables with additional rows that must not affect results."""

    def pad(leaf, axis):
        widths = [(0, rows - VOCAB) if each == axis else (0, 0) for each in range(2)]
        return np.pad(leaf, widths, constant_values=100.0)

    tables = {"embedding": {"weight": pad(params["embedding"]["weight"], 0)}}
    if "head" in params:
        tables["head"] = {"weight": pad(params["head"]["weight"], 1)}
    return params | tables


def objective(cfg, chunk):
    value = minimized(cfg, z_loss=0.1, label_smoothing=0.1, chunk=chunk)
    return jax.jit(jax.value_and_grad(lambda params: value(params, BATCH)))


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_vocabulary_padding_does_not_change_results_and_has_no_gradient(tied, chunk):
    options = {"head": None} if tied else {}
    plain = model(softcap=20.0, decoder=Sequence.Config(layers=()), **options)
    cfg = plain.set(pad_vocab_to=8)
    params = parameters(plain)
    wider = padded_params(params, 8)
    assert jax.tree.map(np.shape, wider) == jax.tree.map(lambda leaf: leaf.shape, abstract(cfg)[1])
    logits = call(cfg, wider, IDS)[0]
    assert logits.shape == (2, 5, VOCAB)
    np.testing.assert_allclose(logits, call(plain, params, IDS)[0], rtol=1e-5, atol=1e-6)
    (expected, slopes), (found, wider_slopes) = objective(plain, chunk)(params), objective(cfg, chunk)(wider)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert not np.any(wider_slopes["embedding"]["weight"][VOCAB:])
    cut = dict(wider_slopes) | {"embedding": {"weight": wider_slopes["embedding"]["weight"][:VOCAB]}}
    if not tied:
        assert not np.any(wider_slopes["head"]["weight"][:, VOCAB:])
        cut["head"] = {"weight": wider_slopes["head"]["weight"][:, :VOCAB]}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), cut, dict(slopes))


@pytest.mark.parametrize(("to", "rows"), [(1, 7), (7, 7), (4, 8), (100, 100)])
def test_tables_are_padded_to_the_next_multiple(to, rows):
    params = abstract(model(pad_vocab_to=to, head=Linear.Config(use_bias=True)))[1]
    assert params["embedding"]["weight"].shape == (rows, DIM)
    assert params["head"]["weight"].shape == (DIM, rows)
    assert params["head"]["bias"].shape == (rows,)
