"""The order of norms, blocks and residuals: pre-norm, sandwich, output norm only, post-norm, parallel."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import (
    Attention,
    CausalLM,
    FeedForward,
    LayerNorm,
    ParallelLayer,
    PostNormLayer,
    Repeat,
    RMSNorm,
    TokenInfo,
    TransformerLayer,
)
from axcore.parallel import Remat
from axcore.testing import tiny_batch

from . import reference
from .support import call, minimized, parameters, wide

pytestmark = pytest.mark.long

BATCH, SEQ, DIM, HEADS = 2, 5, 4, 2
X = np.random.default_rng(5).normal(size=(BATCH, SEQ, DIM)).astype(np.float32)
TOKENS = TokenInfo(np.arange(SEQ, dtype=np.int32)[None], np.arange(SEQ, dtype=np.int32)[None])
BLOCKS = {"attention": Attention.Config(num_heads=HEADS), "ffn": FeedForward.Config(hidden_dim=6)}
RMS, LAYER = RMSNorm.Config(), LayerNorm.Config()


def rms(p, x):
    return reference.rms_norm(x, p["scale"])


def layer(p, x):
    return reference.layer_norm(x, p["scale"], p["bias"])


def attend(p, x):
    return reference.attention(x, p["attention"], HEADS, HEADS, reference.causal(BATCH, SEQ))


def feed(p, x):
    return reference.feed_forward(x, p["ffn"])


def pre(p, x):
    x = x + attend(p, rms(p["attention_norm"], x))
    return x + feed(p, layer(p["ffn_norm"], x))


def sandwich(p, x):
    x = x + rms(p["attention_output_norm"], attend(p, rms(p["attention_norm"], x)))
    return x + rms(p["ffn_output_norm"], feed(p, rms(p["ffn_norm"], x)))


def output_alone(p, x):
    x = x + rms(p["attention_output_norm"], attend(p, x))
    return x + rms(p["ffn_output_norm"], feed(p, x))


def none(p, x):
    x = x + attend(p, x)
    return x + feed(p, x)


def post(p, x):
    x = layer(p["attention_norm"], x + attend(p, x))
    return layer(p["ffn_norm"], x + feed(p, x))


def parallel(p, x):
    y = rms(p["norm"], x)
    return x + attend(p, y) + feed(p, y)


def parallel_apart(p, x):
    return x + attend(p, layer(p["norm"], x)) + feed(p, rms(p["ffn_norm"], x))


def scaled(formula, factor):
    """The layout with a residual scale: the blocks' results are multiplied by `factor`."""

    def of_scaled(p, x):
        p = {name: dict(part) for name, part in p.items()}
        for part, name in (("attention", "projection"), ("ffn", "down")):
            p[part][name] = {"weight": factor * p[part][name]["weight"]}
        return formula(p, x)

    return of_scaled


BARE = {"attention_norm": None, "ffn_norm": None}
OUTPUT = {"attention_output_norm": RMS, "ffn_output_norm": RMS}
LAYOUTS = {
    "pre": (TransformerLayer.Config(ffn_norm=LAYER, **BLOCKS), pre),
    "sandwich": (TransformerLayer.Config(**OUTPUT, **BLOCKS), sandwich),
    "output norm alone": (TransformerLayer.Config(**BARE, **OUTPUT, **BLOCKS), output_alone),
    "no norm": (TransformerLayer.Config(**BARE, **BLOCKS), none),
    "post": (PostNormLayer.Config(**BLOCKS), post),
    "parallel": (ParallelLayer.Config(**BLOCKS), parallel),
    "parallel, two norms": (ParallelLayer.Config(norm=LAYER, ffn_norm=RMS, **BLOCKS), parallel_apart),
    "pre, scaled": (TransformerLayer.Config(ffn_norm=LAYER, residual_scale=0.25, **BLOCKS), scaled(pre, 0.25)),
    "post, scaled": (PostNormLayer.Config(residual_scale=0.25, **BLOCKS), scaled(post, 0.25)),
    "parallel, scaled": (ParallelLayer.Config(residual_scale=0.25, **BLOCKS), scaled(parallel, 0.25)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layer_follows_its_formula(name):
    cfg, formula = LAYOUTS[name]
    cfg = cfg.set(input_dim=DIM)
    params = parameters(cfg)
    expected = formula(wide(params), X.astype(np.float64))
    np.testing.assert_allclose(call(cfg, params, X, TOKENS)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sandwich", "post", "parallel"])
def test_every_parameter_of_a_bfloat16_stack_with_remat_has_a_gradient(name):
    stack = Repeat.Config(num_layers=2, layers=LAYOUTS[name][0], remat=Remat())
    cfg = CausalLM.Config(vocab_size=32, dim=DIM, decoder=stack, dtypes=ax.DTypes(compute="bfloat16"))
    params = parameters(cfg)
    loss, grads = jax.jit(jax.value_and_grad(lambda params: minimized(cfg)(params, tiny_batch())))(params)
    assert np.isfinite(loss)
    for path, gradient in jax.tree.leaves_with_path(grads):
        assert gradient.dtype == np.float32 and np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 1e-6, jax.tree_util.keystr(path)


def test_an_invalid_part_raises_with_its_path():
    for cls in (TransformerLayer, PostNormLayer, ParallelLayer):
        bad = cls.Config(input_dim=DIM, attention=Attention.Config(num_heads=3), ffn=FeedForward.Config(hidden_dim=6))
        with pytest.raises(
            ax.ConfigError, match="attention: input_dim=4 is not a multiple of num_heads=3; set head_dim"
        ):
            abstract(bad)
