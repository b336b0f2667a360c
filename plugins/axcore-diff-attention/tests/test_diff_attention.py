"""Differential attention against the formulas of the paper in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.module import abstract
from axcore.nn import (
    Attention,
    AttentionInputs,
    CausalLM,
    ChooseKernel,
    Contiguous,
    ContiguousCache,
    FeedForward,
    KernelRequest,
    ReferenceKernel,
    Repeat,
    SlidingWindow,
    TokenInfo,
    TransformerLayer,
    refusal,
)
from axcore_diff_attention.kernel import DiffAttention, use_diff_attention

pytestmark = pytest.mark.long

BATCH, SEQ, HEAD_DIM = 2, 7, 4
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2]], np.int32)
TOKENS = TokenInfo(np.arange(SEQ, dtype=np.int32)[None], np.arange(SEQ, dtype=np.int32)[None], SEGMENTS)
MASK = Attention.Config().mask


def arrays(seed, num_heads, num_kv_heads, dtype=np.float32):
    random = np.random.default_rng(seed)
    return [
        random.normal(size=(BATCH, SEQ, count, HEAD_DIM)).astype(dtype) for count in (num_heads, *[num_kv_heads] * 2)
    ]


def asked(q, k, v, mask=MASK, **options):
    return AttentionInputs(q, Contiguous(k, v, TOKENS), TOKENS, scale=HEAD_DIM**-0.5, mask=mask, **options)


def built(num_heads, num_kv_heads, **options):
    cfg = DiffAttention.Config(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, **options)
    fn, shapes, _ = abstract(cfg)
    random = np.random.default_rng(9)
    params = jax.tree.map(lambda leaf: (0.4 * random.normal(size=leaf.shape)).astype(leaf.dtype), shapes)
    return fn, params


def softmax(scores, seen):
    weights = np.where(seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    return weights / weights.sum(axis=-1, keepdims=True)


def differential(params, q, k, v, seen, lambda_init):
    """Equations 1 to 3, pair by pair: [batch, seq, pair, 2 head_dim]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    p = {name: np.asarray(value, np.float64) for name, value in params.items() if name != "norm"}
    share = np.exp(p["lambda_q1"] @ p["lambda_k1"]) - np.exp(p["lambda_q2"] @ p["lambda_k2"]) + lambda_init
    group = q.shape[2] // k.shape[2]
    out = []
    for pair in range(k.shape[2] // 2):
        k1, k2 = k[:, :, 2 * pair], k[:, :, 2 * pair + 1]
        wide = np.concatenate([v[:, :, 2 * pair], v[:, :, 2 * pair + 1]], axis=-1)
        for member in range(group):
            q1, q2 = q[:, :, 2 * pair * group + member], q[:, :, (2 * pair + 1) * group + member]
            maps = [softmax(a @ b.swapaxes(1, 2) / np.sqrt(a.shape[-1]), seen) for a, b in ((q1, k1), (q2, k2))]
            head = (maps[0] - share * maps[1]) @ wide
            rms = np.sqrt(np.square(head).mean(axis=-1, keepdims=True) + 1e-5)
            out.append((1 - lambda_init) * head / rms * np.asarray(params["norm"]["scale"], np.float64))
    return np.stack(out, axis=2)


def seen_by_default():
    return np.tril(np.ones((SEQ, SEQ), bool)) & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 4), (8, 4), (12, 4), (6, 2)])
@pytest.mark.parametrize("lambda_init", [0.8, 0.2])
def test_matches_the_equations_for_every_head_ratio(num_heads, num_kv_heads, lambda_init):
    fn, params = built(num_heads, num_kv_heads, lambda_init=lambda_init)
    q, k, v = arrays(0, num_heads, num_kv_heads)
    ((found, lse), reported), _ = jax.jit(fn)(params, {}, asked(q, k, v))
    assert lse is None
    assert found.shape == q.shape and found.dtype == q.dtype
    expected = differential(params, q, k, v, seen_by_default(), lambda_init)
    np.testing.assert_allclose(found, expected.reshape(found.shape), rtol=1e-4, atol=1e-5)
    p = {name: np.asarray(params[f"lambda_{name}"], np.float64) for name in ("q1", "k1", "q2", "k2")}
    share = np.exp(p["q1"] @ p["k1"]) - np.exp(p["q2"] @ p["k2"]) + lambda_init
    assert float(reported.summaries["lambda"]) == pytest.approx(share, rel=1e-5)


def test_applies_the_mask():
    fn, params = built(2, 2)
    q, k, v = arrays(0, 2, 2)
    ((found, _), _), _ = fn(params, {}, asked(q, k, v, MASK & SlidingWindow(size=2)))
    window = np.subtract.outer(np.arange(SEQ), np.arange(SEQ)) < 2
    expected = differential(params, q, k, v, seen_by_default() & window, 0.8)
    np.testing.assert_allclose(found, expected.reshape(found.shape), rtol=1e-4, atol=1e-5)


def test_bfloat16_inputs_are_subtracted_in_float32():
    fn, params = built(4, 2)
    q, k, v = arrays(0, 4, 2, jnp.bfloat16)
    ((found, _), _), _ = fn(params, {}, asked(q, k, v))
    assert found.dtype == jnp.bfloat16
    expected = differential(params, q, k, v, seen_by_default(), 0.8)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected.reshape(found.shape), atol=0.03)


class EqualWidths(ReferenceKernel):
    """Requires bfloat16 and equal widths of q, k and v, like kernels for accelerators."""

    takes = frozenset()

    def supports(self, request):
        if request.dtype != jnp.bfloat16:
            return "it computes in bfloat16"
        return None if request.value_dim == request.head_dim else "v must be as wide as q"

    def __call__(self, inputs):
        kv = inputs.plain
        assert inputs.q.shape[3] == kv.k.shape[3] and kv.k.shape == kv.v.shape
        return super().__call__(inputs)


def test_inner_kernel_gets_equal_widths_and_decides_support():
    layer = DiffAttention.Config(num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, kernel=EqualWidths.Config())
    layer = layer.build(rngs=ax.Rngs(0))
    low, full = arrays(0, 4, 2, jnp.bfloat16), arrays(0, 4, 2)
    assert refusal(layer, KernelRequest.of(asked(*low))) is None
    assert refusal(layer, KernelRequest.of(asked(*full))) == "it computes in bfloat16"
    assert "softcap" in refusal(layer, KernelRequest.of(asked(*low, softcap=3.0)))
    assert "lse" in refusal(layer, KernelRequest.of(asked(*low, return_lse=True)))
    with pytest.raises(ax.ConfigError, match=r"no kernel supports the call .*EqualWidths: it computes in bfloat16"):
        ax.invoke(layer, asked(*full))
    (heads, _), _ = ax.invoke(layer, asked(*low))
    assert np.isfinite(np.asarray(heads, np.float32)).all()


def test_inner_kernel_can_be_choose_kernel():
    order = (EqualWidths.Config(), ReferenceKernel.Config())
    fn, params = built(4, 2, kernel=ChooseKernel.Config(order=order))
    q, k, v = arrays(0, 4, 2)
    ((found, _), _), _ = fn(params, {}, asked(q, k, v))
    expected = differential(params, q, k, v, seen_by_default(), 0.8)
    np.testing.assert_allclose(found, expected.reshape(found.shape), rtol=1e-4, atol=1e-5)


def model(num_heads=4, num_kv_heads=2):
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=num_heads, num_kv_heads=num_kv_heads),
        ffn=FeedForward.Config(hidden_dim=8),
    )
    return CausalLM.Config(vocab_size=7, dim=8 * num_heads, decoder=Repeat.Config(num_layers=2, layers=layer))


def test_feature_wraps_the_existing_kernel():
    cfg = ax.pipe(model(), ax.use("cudnn"), ax.use("rope"), ax.use("diff-attention", lambda_init=0.5))
    attention, before = cfg.decoder.layers.attention, ax.use("cudnn")(model()).decoder.layers.attention
    assert attention.kernel == DiffAttention.Config(kernel=before.kernel, lambda_init=0.5)
    assert type(attention.position).__module__ == "axcore_rope.rotary"
    assert model().decoder.layers.attention.kernel == ReferenceKernel.Config()
    with pytest.raises(ax.ConfigError, match=r"at decoder\.layers\.attention: the attention is already differential"):
        use_diff_attention(cfg)
    with pytest.raises(ax.ConfigError, match=r"at decoder\.layers\.ffn: only attentions with a kernel slot"):
        use_diff_attention(cfg, where=FeedForward)


@pytest.mark.parametrize("name", ["cudnn", "reference"])
def test_later_kernel_features_replace_the_inner_kernel(name):
    cfg = ax.pipe(model(), ax.use("diff-attention"), ax.use(name))
    kernel = cfg.decoder.layers.attention.kernel
    assert kernel == DiffAttention.Config(kernel=ax.use(name)(model()).decoder.layers.attention.kernel)


def test_later_kernel_order_replaces_the_inner_kernel():
    cfg = ax.pipe(model(), ax.use("diff-attention"), ax.use("kernels", order=("cudnn", "reference")))
    assert isinstance(cfg.decoder.layers.attention.kernel.kernel, ChooseKernel.Config)


def test_adds_five_small_parameters_to_each_attention():
    before, after = abstract(model())[1], abstract(use_diff_attention(model()))[1]
    kernel = after["decoder"]["layers"]["attention"].pop("kernel")
    assert jax.tree.structure(after) == jax.tree.structure(before)
    vectors = {f"lambda_{name}": (2, 8) for name in ("q1", "k1", "q2", "k2")}
    assert {name: leaf.shape for name, leaf in kernel.items() if name != "norm"} == vectors
    assert kernel["norm"]["scale"].shape == (2, 16)


@pytest.mark.parametrize("pieces", [(3, 1, 2), pytest.param((1,) * 6, marks=pytest.mark.slow)])
def test_cached_decoding_matches_the_full_pass(pieces):
    cfg = ax.pipe(model(), ax.use("rope"), ax.use("diff-attention"))
    whole = cfg.build(rngs=ax.Rngs(0))
    ids = np.random.default_rng(0).integers(0, 7, (2, sum(pieces))).astype(np.int32)
    decoder, params, state = Decoder.of(whole, cache=ContiguousCache.Config(), batch_size=2, max_len=8)
    step, logits, start = jax.jit(decoder.__call__), [], 0
    for piece in pieces:
        tokens = Step(ids[:, start : start + piece], np.full((2,), start, np.int32))
        found, state = step(params, state, tokens)
        logits.append(found)
        start += piece
    expected, _ = ax.invoke(whole, ids)
    np.testing.assert_allclose(np.concatenate(logits, axis=1), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 1), (3, 3), (9, 3)])
def test_odd_num_kv_heads_raises_with_the_path(num_heads, num_kv_heads):
    with pytest.raises(ax.ConfigError, match=rf"^decoder\.layers\.attention\.kernel: .*even, not {num_kv_heads}"):
        abstract(use_diff_attention(model(num_heads, num_kv_heads)))


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_lambda_init_out_of_range_raises(value):
    with pytest.raises(ax.ConfigError, match=rf"lambda_init must be .*, not {value}"):
        abstract(use_diff_attention(model(), lambda_init=value))
