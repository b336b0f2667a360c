"""Dropout of embeddings, attention weights, residual branches and hidden features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import (
    Attention,
    AttentionKernel,
    CausalLM,
    FeedForward,
    Full,
    Linear,
    Ones,
    ParallelLayer,
    PostNormLayer,
    ReferenceKernel,
    Repeat,
    Sequence,
    TokenInfo,
    TransformerLayer,
    dropout,
)
from axcore.parallel import Remat
from axcore.testing import tiny_batch
from axcore.train import CrossEntropy

from .support import parameters, shapes

pytestmark = pytest.mark.long

RATE, DIM = 0.25, 8
KEY = jax.random.key(3)
TOKENS = TokenInfo.of(jnp.zeros((2, 6), jnp.int32))
X = np.random.default_rng(5).normal(size=(2, 6, DIM)).astype(np.float32)
IDENTITY = Linear.Config(init=Ones())


class Dropped(ax.Layer):
    class Config(ax.Layer.Config):
        rate: float

    def __call__(self, x):
        return dropout(self, x, self.config.rate)


def trained(cfg, *args, params=None, key=KEY, training=True):
    fn = shapes(cfg)[0]
    params = parameters(cfg) if params is None else params
    return jax.jit(lambda params: fn(params, {}, *args, key=key, training=training)[0][0])(params)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_elements_are_zeroed_at_the_rate_and_others_scaled_up(dtype):
    found = trained(Dropped.Config(rate=RATE), jnp.ones((100, 200), dtype), params={})
    assert found.dtype == dtype
    found = np.asarray(found, np.float64)
    np.testing.assert_allclose(np.unique(found), [0, 1 / (1 - RATE)], rtol=2**-8)
    assert abs((found == 0).mean() - RATE) < 0.02  # 20,000 draws: five standard deviations are 0.015
    assert abs((found == 0).mean(axis=0) - RATE).max() < 0.25  # in every column


def attention(rate=RATE, chunk=None):
    kernel = ReferenceKernel.Config(chunk=chunk)
    return Attention.Config(input_dim=DIM, num_heads=2, dropout=rate, kernel=kernel)


def ffn(rate=RATE):
    return FeedForward.Config(input_dim=DIM, hidden_dim=12, dropout=rate)


def layer(cls, rate=RATE):
    return cls.Config(input_dim=DIM, attention=attention(0.0), ffn=ffn(0.0), dropout=rate)


PLACES = {
    "attention weights": attention,
    "chunked attention weights": lambda rate=RATE: attention(rate, chunk=2),
    "hidden features": ffn,
    **{f"{cls.__name__}, residual": lambda rate=RATE, cls=cls: layer(cls, rate)
       for cls in (TransformerLayer, PostNormLayer, ParallelLayer)},
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_dropout_acts_only_while_training_and_keeps_the_mean(place):
    cfg = PLACES[place]()
    args = (X,) if isinstance(cfg, FeedForward.Config) else (X, TOKENS)
    params = parameters(cfg, scale=0.2)
    plain = trained(cfg, *args, params=params, training=False, key=None)
    np.testing.assert_array_equal(trained(PLACES[place](0.0), *args, params=params, key=None), plain)
    one, again, other = (trained(cfg, *args, params=params, key=jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - plain).max() > 1e-3
    assert np.abs(one - other).max() > 1e-3
    if cfg.dropout and not isinstance(cfg, PostNormLayer.Config):  # the output is linear in the dropped values
        if isinstance(cfg, TransformerLayer.Config):
            return  # a norm lies between the dropout of the first block and the second block
        fn = shapes(cfg)[0]
        many = jax.jit(
            jax.vmap(lambda key: fn(params, {}, *args, key=key, training=True)[0][0])
        )(jax.random.split(KEY, 2000))  # fmt: skip
        spread = many.std(axis=0) / np.sqrt(len(many))
        assert (np.abs(many.mean(axis=0) - plain) <= 6 * spread + 1e-5).all()


def test_the_two_residual_branches_draw_different_bits():
    """With blocks that return ones, the output shows the dropped elements of each branch."""

    class One(ax.Layer):
        def __call__(self, x, *args):
            return jnp.ones_like(x)

    cfg = TransformerLayer.Config(
        input_dim=64, attention_norm=None, attention=One.Config(), ffn_norm=None, ffn=One.Config(), dropout=0.5
    )
    found = np.asarray(trained(cfg, jnp.zeros((2, 6, 64)), TOKENS, params={}))
    assert set(np.unique(found)) == {0.0, 2.0, 4.0}
    assert abs((found == 2).mean() - 0.5) < 0.1


def test_embeddings_are_dropped():
    class Nothing(ax.Layer):
        def __call__(self, x, *args):
            return x

    cfg = CausalLM.Config(
        vocab_size=5, dim=5, decoder=Nothing.Config(), norm=Nothing.Config(), head=IDENTITY, dropout=RATE
    )
    params = {"embedding": {"weight": jnp.ones((5, 5))}, "head": {"weight": jnp.eye(5)}}
    found = np.asarray(trained(cfg, jnp.zeros((40, 50), jnp.int32), params=params))
    np.testing.assert_allclose(np.unique(found), [0, 1 / (1 - RATE)], rtol=1e-6)
    assert abs((found == 0).mean() - RATE) < 0.03


def test_each_chunk_of_queries_draws_different_bits():
    """One-hot values show the attention weights; all queries of a row see the same keys."""
    seq = 6
    cfg = attention(0.5, chunk=2).set(mask=Full(), num_heads=1, input_dim=seq)
    params = {
        "query": {"weight": jnp.zeros((seq, seq))},
        "key": {"weight": jnp.zeros((seq, seq))},
        "value": {"weight": jnp.eye(seq)},
        "projection": {"weight": jnp.eye(seq)},
    }
    rows = jnp.broadcast_to(jnp.eye(seq), (50, seq, seq))
    weights = np.asarray(trained(cfg, rows, TokenInfo.of(jnp.zeros((50, seq), jnp.int32)), params=params))
    np.testing.assert_allclose(np.unique(weights), [0, 2 / seq], rtol=1e-5)
    dropped = (weights == 0).reshape(50, 3, 2, seq)
    assert abs(dropped.mean() - 0.5) < 0.06
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert abs((dropped[:, one] == dropped[:, other]).mean() - 0.5) < 0.1


@pytest.mark.parametrize("chunk", [None, 2])
def test_the_gradient_uses_the_same_random_bits(chunk):
    cfg = attention(chunk=chunk)
    fn, params = shapes(cfg)[0], parameters(cfg, scale=0.3)
    objective = jax.jit(lambda x: jnp.sum(fn(params, {}, x, TOKENS, key=KEY, training=True)[0][0] ** 2))
    direction = np.random.default_rng(0).normal(size=X.shape).astype(np.float32)
    step = 1e-2
    slope = (objective(X + step * direction) - objective(X - step * direction)) / (2 * step)
    np.testing.assert_allclose(np.sum(jax.grad(objective)(X) * direction), slope, rtol=5e-3)


def dropping(decoder):
    return CausalLM.Config(vocab_size=32, dim=DIM, decoder=decoder, dropout=0.1)


def loss_and_gradient(cfg, params):
    fn = shapes(cfg)[0]

    def objective(params):
        return CrossEntropy.Config().build().value(fn, params, {}, tiny_batch(), key=KEY, training=True)

    return jax.device_get(jax.jit(jax.value_and_grad(objective))(params))


LAYER = TransformerLayer.Config(
    attention=Attention.Config(num_heads=2, dropout=RATE),
    ffn=FeedForward.Config(hidden_dim=12, dropout=RATE),
    dropout=RATE,
)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"unroll": 3, "remat": Remat()}, {"unroll": 3}, {"remat": Remat()}], ids=str)
def test_unrolling_and_remat_do_not_change_dropout(changes):
    stack = Repeat.Config(num_layers=3, layers=LAYER)
    params = parameters(dropping(stack))
    expected, found = (loss_and_gradient(dropping(each), params) for each in (stack, stack.set(**changes)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)


def test_a_scan_drops_the_same_elements_as_a_list_of_layers():
    stack = Repeat.Config(num_layers=3, layers=LAYER)
    params = parameters(dropping(stack))
    listed = {str(i): jax.tree.map(lambda leaf, i=i: leaf[i], params["decoder"]["layers"]) for i in range(3)}
    spread = params | {"decoder": {"layers": {int(i): each for i, each in listed.items()}}}
    expected, _ = loss_and_gradient(dropping(stack), params)
    found, _ = loss_and_gradient(dropping(Sequence.Config(layers=(LAYER,) * 3)), spread)
    np.testing.assert_allclose(found, expected, rtol=1e-5)

    ones = Repeat.Config(input_dim=400, num_layers=3, layers=Dropped.Config(rate=0.5))
    survived = np.asarray(trained(ones, jnp.ones((1, 1, 400)), params={"layers": {}}))
    np.testing.assert_array_equal(np.unique(survived), [0, 8])
    assert abs((survived == 8).mean() - 1 / 8) < 0.08  # equal bits in each layer would keep half of the elements


class Undropped(AttentionKernel):
    """A kernel that takes no option."""

    def __call__(self, inputs):
        return inputs.q, None


def test_a_kernel_without_dropout_raises_only_while_training():
    cfg = TransformerLayer.Config(input_dim=DIM, attention=attention().set(kernel=Undropped.Config()), ffn=ffn())
    params = parameters(cfg)
    trained(cfg, X, TOKENS, params=params, training=False)
    with pytest.raises(
        ax.ConfigError, match=r"attention\.kernel: no kernel supports the call .*Undropped: does not take dropout"
    ):
        trained(cfg, X, TOKENS, params=params)
