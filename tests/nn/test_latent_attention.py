"""Latent attention: the formula, the cache of latents, and decoding with absorbed weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.module import abstract, functional
from axcore.nn import (
    AttentionKernel,
    CausalLM,
    ChooseKernel,
    ContiguousCache,
    FeedForward,
    KVCache,
    Latent,
    LatentAttention,
    Linear,
    Normal,
    ReferenceKernel,
    Repeat,
    TokenInfo,
    TransformerLayer,
    for_decoding,
    use_kernels,
)
from axcore.nn.choosing import recording
from axcore.numerics import Numerics
from axcore.parallel import Remat
from axcore.testing import tiny_batch

from . import reference, support
from .support import call, minimized, parameters, wide

pytestmark = pytest.mark.long

BATCH, SEQ, DIM, HEADS = 2, 6, 8, 3
SIZES = {
    "num_heads": HEADS,
    "kv_lora_rank": 5,
    "q_lora_rank": 7,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "value_dim": 3,
}
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 0]], np.int32)
TOKENS = TokenInfo(np.arange(SEQ, dtype=np.int32)[None], POSITIONS, SEGMENTS)
X = np.random.default_rng(3).normal(size=(BATCH, SEQ, DIM)).astype(np.float32)
ALLOWED = reference.causal(BATCH, SEQ, SEGMENTS)


class Turn(ax.Layer):
    """A position embedding that rotates the only pair of features by the position, like RoPE."""

    class Config(ax.Layer.Config):
        head_dim: int = ax.REQUIRED

    def __init__(self, cfg, *, rngs):
        assert cfg.head_dim == SIZES["qk_rope_head_dim"]

    def __call__(self, q, k, query_positions, key_positions):
        return turned(q, query_positions, jnp), turned(k, key_positions, jnp)


def turned(x, positions, lib=np):
    angle = positions[:, :, None]
    cos, sin = lib.cos(1.0 * angle).astype(x.dtype), lib.sin(1.0 * angle).astype(x.dtype)
    return lib.stack([x[..., 0] * cos - x[..., 1] * sin, x[..., 0] * sin + x[..., 1] * cos], axis=-1)


def latent(**changes):
    return LatentAttention.Config(**{"input_dim": DIM, "position": Turn.Config(), **SIZES} | changes)


def by_formula(params, **options):
    return reference.latent_attention(
        X.astype(np.float64),
        wide(params),
        HEADS,
        SIZES["qk_nope_head_dim"],
        ALLOWED,
        lambda x: turned(x, POSITIONS),
        **options,
    )


def decoded(cfg, params, pieces):
    return support.decoded(cfg, params, X, TOKENS, pieces, max_len=SEQ + 2)


ONE_BY_ONE = [(i, i + 1) for i in range(SEQ)]
IN_PIECES = [(0, 3), (3, 4), (4, 6)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"q_lora_rank": None}, {"scale": 0.9}, {"softcap": 0.5}, {"sinks": Normal()}, {"position": None}],
    ids=str,
)
def test_latent_attention_follows_the_formula(changes):
    cfg = latent(**changes)
    params = parameters(cfg)
    options = {name: value for name, value in changes.items() if name in ("scale", "softcap")}
    if "sinks" in params:
        options["sinks"] = wide(params)["sinks"]
    if cfg.position is None:
        expected = reference.latent_attention(X.astype(np.float64), wide(params), HEADS, 4, ALLOWED)
    else:
        expected = by_formula(params, **options)
    np.testing.assert_allclose(call(cfg, params, X, TOKENS)[0], expected, rtol=1e-4, atol=1e-5)


def test_parameters_have_the_expected_shapes_and_axes():
    fn, params, _ = abstract(latent())
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    assert found == {
        "query_down.weight": (8, 7),
        "query_norm.scale": (7,),
        "query_up.weight": (7, 18),
        "kv_down.weight": (8, 5),
        "kv_norm.scale": (5,),
        "position_key.weight": (8, 2),
        "key_up.weight": (5, 12),
        "value_up.weight": (5, 9),
        "projection.weight": (9, 8),
    }
    assert fn.axes["query_down"]["weight"] == fn.axes["kv_down"]["weight"] == ("embed", None)
    assert fn.axes["key_up"]["weight"] == fn.axes["query_up"]["weight"] == (None, "head")
    assert fn.axes["projection"]["weight"] == ("head", "embed")
    assert abstract(latent(q_lora_rank=None))[0].axes["query_up"]["weight"] == ("embed", "head")


@pytest.mark.parametrize("absorb_up_to", [0, 1, 64], ids="absorbed up to {}".format)
@pytest.mark.parametrize(
    "pieces",
    [[(0, SEQ)], pytest.param(ONE_BY_ONE, marks=pytest.mark.slow), IN_PIECES],
    ids=["at once", "one by one", "in pieces"],
)
def test_absorbed_and_expanded_decoding_follow_the_formula(pieces, absorb_up_to):
    cfg = latent(absorb_up_to=absorb_up_to)
    params = parameters(cfg)
    np.testing.assert_allclose(decoded(cfg, params, pieces), by_formula(params), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"scale": 0.9}, {"softcap": 0.5}, {"sinks": Normal(stddev=1.0)}, {"q_lora_rank": None}], ids=str
)
def test_absorbed_decoding_applies_the_options_of_the_config(changes):
    cfg = latent(**changes)
    params = parameters(cfg)
    np.testing.assert_allclose(decoded(cfg, params, ONE_BY_ONE), call(cfg, params, X, TOKENS)[0], rtol=1e-4, atol=1e-5)


def test_the_cache_stores_one_latent_and_one_rotated_key_per_token():
    cfg = latent(cache=ContiguousCache.Config(batch_size=BATCH, max_len=9))
    state = abstract(cfg)[2]["cache"]
    assert state["keys"].shape == (BATCH, 9, 1, 5 + 2)
    assert state["values"].size == 0


class LowRank(ax.Layer):
    """An adapter like LoRA."""

    class Config(ax.Layer.Config):
        input_dim: int = ax.REQUIRED
        output_dim: int = ax.REQUIRED

    def __init__(self, cfg, *, rngs):
        self.a = self.param("a", (cfg.input_dim, 1), Normal(), rngs, axes=(None, None))
        self.b = self.param("b", (1, cfg.output_dim), Normal(), rngs, axes=(None, None))

    def __call__(self, x, y, weight, product):
        return y + x @ self.a[...] @ self.b[...]


class Rounded(Numerics):
    """Weights in multiples of 1/4."""

    def matrix(self, weight):
        return jnp.round(4 * weight) / 4


@pytest.mark.parametrize("name", ["key_up", "value_up"])
@pytest.mark.parametrize("slot", ["adapter", "numerics"])
def test_adapters_and_numerics_act_in_absorbed_weights_too(name, slot):
    linear = Linear.Config(**{slot: (LowRank if slot == "adapter" else Rounded).Config()})
    cfg = latent(**{name: linear})
    params = parameters(cfg)
    expected = call(cfg, params, X, TOKENS)[0]
    plain = {part: {"weight": params[part]["weight"]} if part == name else params[part] for part in params}
    assert np.abs(expected - call(latent(), plain, X, TOKENS)[0]).max() > 1e-3
    np.testing.assert_allclose(decoded(cfg, params, ONE_BY_ONE), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["query_down", "query_up", "kv_down", "position_key", "projection"])
def test_biases_are_added_where_weights_are_not_absorbed(name):
    cfg = latent(**{name: Linear.Config(use_bias=True)})
    params = parameters(cfg)
    np.testing.assert_allclose(call(cfg, params, X, TOKENS)[0], by_formula(params), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(decoded(cfg, params, ONE_BY_ONE), by_formula(params), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["key_up", "value_up"])
def test_a_bias_that_cannot_be_absorbed_raises(name):
    with pytest.raises(ax.ConfigError, match=rf"{name}\.use_bias"):
        abstract(latent(**{name: Linear.Config(use_bias=True)}))


def model(attention=None, **changes):
    layer = TransformerLayer.Config(
        attention=latent().set(input_dim=ax.REQUIRED) if attention is None else attention,
        ffn=FeedForward.Config(hidden_dim=12),
    )
    decoder = Repeat.Config(num_layers=2, layers=layer, **changes)
    return CausalLM.Config(vocab_size=32, dim=DIM, decoder=decoder)


def rms(x):
    return np.sqrt(np.square(x).mean())


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_decoding_a_scanned_model_equals_one_full_call(compute):
    cfg = model().set(dtypes=ax.DTypes(compute=compute))
    built = cfg.build(rngs=ax.Rngs(0))
    ids = tiny_batch()["inputs"]
    decoder, params, state = Decoder.of(built, cache=ContiguousCache.Config(), batch_size=2, max_len=ids.shape[1])
    expected = np.asarray(call(cfg, functional(built)[1], ids)[0])
    step = jax.jit(decoder.__call__)
    found = []
    for start, stop in [(0, 4), *((i, i + 1) for i in range(4, ids.shape[1]))]:
        logits, state = step(params, state, Step(ids[:, start:stop], jnp.full((2,), start, jnp.int32)))
        found.append(logits)
    found = np.concatenate(found, axis=1).astype(np.float64)
    if compute == "float32":
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    else:  # absorbed products round in other places, with similar errors
        exact = np.asarray(call(model(), functional(built)[1], ids)[0], np.float64)
        assert rms(found - exact) < 2 * rms(expected.astype(np.float64) - exact)


@pytest.mark.long
def test_nan_of_an_earlier_row_is_not_seen():
    """The latents are values, too. Steps with absorbed weights and with expanded latents."""
    decoder, params, empty = Decoder.of(
        model(latent(absorb_up_to=2).set(input_dim=ax.REQUIRED)).build(rngs=ax.Rngs(0)),
        cache=ContiguousCache.Config(),
        batch_size=2,
        max_len=8,
    )
    step, ids, start = jax.jit(decoder.__call__), tiny_batch()["inputs"], jnp.zeros(2, jnp.int32)
    spoiled = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    state = step(spoiled, empty, Step(ids[:, :8], start))[1]
    for size in (2, 3):
        begun = Step(ids[:, :size], start)
        np.testing.assert_allclose(step(params, state, begun)[0], step(params, empty, begun)[0], atol=1e-6)


def test_every_parameter_of_a_scanned_model_with_remat_has_a_gradient():
    cfg = model(remat=Remat())
    params = parameters(cfg, scale=0.3)
    grads = jax.jit(jax.grad(lambda params: minimized(cfg)(params, tiny_batch())))(params)
    for path, gradient in jax.tree.leaves_with_path(grads):
        assert np.abs(gradient).max() > 1e-6, jax.tree_util.keystr(path)


class NarrowValues(AttentionKernel):
    """A kernel that requires equal widths of keys and values, like some fused kernels."""

    def supports(self, request):
        return None if request.value_dim == request.head_dim else "requires value_dim equal to head_dim"

    takes = frozenset({"lse"})

    def __call__(self, inputs):
        raise AssertionError("this kernel must not be called")


def test_kernel_requests_contain_the_widths_of_latent_attention():
    order = (NarrowValues.Config(), ReferenceKernel.Config())
    cfg = latent(kernel=ChooseKernel.Config(order=order))
    params = parameters(cfg)
    np.testing.assert_allclose(call(cfg, params, X, TOKENS)[0], by_formula(params), rtol=1e-4, atol=1e-5)
    with recording() as choices:
        jax.eval_shape(abstract(cfg)[0], params, {}, X, TOKENS)
    (choice,) = choices
    assert isinstance(choice.chosen, ReferenceKernel)
    (request,) = choice.requests
    assert (request.num_kv_heads, request.head_dim, request.value_dim) == (HEADS, 6, 3)
    alone = latent(kernel=NarrowValues.Config())
    with pytest.raises(
        ax.ConfigError, match=r"no kernel supports the call .*NarrowValues: requires value_dim equal to head_dim"
    ):
        call(alone, params, X, TOKENS)
    assert use_kernels(cfg, ("reference",)).kernel.order == (ReferenceKernel.Config(),)


def test_kernel_requests_while_decoding_have_one_kv_head_of_latents():
    cfg = latent(kernel=ChooseKernel.Config(order=(ReferenceKernel.Config(),)))
    with recording() as choices:
        decoded(cfg, parameters(cfg), [(0, 1)])
    (choice,) = choices
    (request,) = choice.requests
    assert request.phase == "decode"
    assert request.view is Latent
    assert (request.num_kv_heads, request.head_dim, request.value_dim) == (1, 7, 5)


class Narrow(KVCache):
    """A cache without a field for the width of values."""

    class Config(KVCache.Config):
        num_kv_heads: int = ax.REQUIRED
        head_dim: int = ax.REQUIRED


def test_a_cache_that_cannot_store_latents_raises_with_its_path():
    with pytest.raises(
        ax.ConfigError,
        match=r"layers\.attention: cache=.*Narrow.* has no field value_dim, which storing latents requires",
    ):
        abstract(for_decoding(model(), batch_size=1, max_len=4, cache=Narrow.Config()))


def test_a_missing_rank_raises_with_its_path():
    with pytest.raises(ax.ConfigError, match=r"decoder\.layers\.attention.*kv_lora_rank is REQUIRED"):
        abstract(model(latent(kv_lora_rank=ax.REQUIRED, input_dim=ax.REQUIRED)))
