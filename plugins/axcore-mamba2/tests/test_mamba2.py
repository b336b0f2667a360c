"""The layer against its formula in NumPy float64; documents, decoding, errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import CachedRows, ContiguousCache, Linear, TokenInfo, for_decoding
from axcore.testing import RecurrentSuite
from axcore_mamba2.initializers import LogRates, StepBias
from axcore_mamba2.mixer import Mamba2
from axcore_mamba2.norm import GatedRMSNorm

DIM, HEADS, HEAD_DIM, GROUPS, STATE_DIM, WIDTH, SEQ = 6, 4, 3, 2, 5, 4, 13
CONFIG = Mamba2.Config(input_dim=DIM, head_dim=HEAD_DIM, num_groups=GROUPS, state_dim=STATE_DIM, chunk=4)
SEGMENTS = np.array([[3] * 6 + [8] * 2 + [1] * 5, [0] * 12 + [1]], np.int32)


@functools.cache
def layer(cfg=CONFIG, batch_size=None):
    """(function, parameters, state), with random parameters and the state before the first token."""
    if batch_size is not None:
        cfg = for_decoding(cfg, batch_size=batch_size, max_len=64, cache=ContiguousCache.Config())
    fn, params, state = abstract(cfg)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(scale=0.6, size=leaf.shape).astype(leaf.dtype), params)
    return fn, params, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)


def inputs(seed=0, batch=2, seq=SEQ):
    return np.random.default_rng(seed).normal(size=(batch, seq, DIM)).astype(np.float32)


def span(start, stop, segments=None, valid=None):
    """The `TokenInfo` of tokens `start` to `stop` of a row."""
    index = np.arange(start, stop, dtype=np.int32)[None]
    return TokenInfo(index, index, None if segments is None else segments[:, start:stop], valid)


@functools.partial(jax.jit, static_argnames="fn")
def call(fn, params, state, x, tokens):
    if jax.tree.leaves(state):  # `Decoder` also passes the rows that the tokens continue
        tokens = dataclasses.replace(tokens, cached=CachedRows(tokens, lengths=tokens.index[:, -1] + 1))
    (y, _), state = fn(params, state, x, tokens)
    return y, state


def full(x, tokens=None, **options):
    fn, params, state = layer(**options)
    return call(fn, params, state, x, tokens or span(0, x.shape[1]))[0]


def formula(x, weights=None):
    """The layer in NumPy float64, with one document per row."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights or layer()[1])
    silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731
    z, xs, B, C, dt = (x @ weights[f"{name}_proj"]["weight"] for name in ("z", "x", "B", "C", "dt"))
    convolved = []
    for name, part in zip("xBC", (xs, B, C), strict=True):
        y = np.zeros_like(part) + weights[f"{name}_conv"]["bias"]
        for lag in range(WIDTH):
            y[:, lag:] += part[:, : part.shape[1] - lag] * weights[f"{name}_conv"]["weight"][WIDTH - 1 - lag]
        convolved.append(silu(y))
    xs, B, C = (part.reshape(*x.shape[:2], count, -1) for part, count in zip(convolved, (HEADS, 2, 2), strict=True))
    B, C = np.repeat(B, HEADS // GROUPS, axis=2), np.repeat(C, HEADS // GROUPS, axis=2)
    dt, A = np.log1p(np.exp(dt + weights["dt_bias"])), -np.exp(weights["A_log"])
    state, y = np.zeros((len(x), HEADS, HEAD_DIM, STATE_DIM)), np.zeros_like(xs)
    for t in range(x.shape[1]):
        state = np.exp(dt[:, t] * A)[..., None, None] * state
        state += np.einsum("bh,bhp,bhn->bhpn", dt[:, t], xs[:, t], B[:, t])
        y[:, t] = np.einsum("bhpn,bhn->bhp", state, C[:, t]) + weights["D"][:, None] * xs[:, t]
    y = (y.reshape(z.shape) * silu(z)).reshape(*x.shape[:2], GROUPS, -1)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5)
    return (y.reshape(z.shape) * weights["norm"]["scale"]) @ weights["out_proj"]["weight"]


class TestDecoding(RecurrentSuite):
    pytestmark = pytest.mark.slow
    tolerance = 1e-4

    def config(self):
        return CONFIG

    def reference(self, params, x):
        nested = {}
        for path, value in params.items():
            *parents, name = path.split(".")
            functools.reduce(lambda node, key: node.setdefault(key, {}), parents, nested)[name] = value
        return formula(x, nested)


def test_layer_matches_the_formula():
    x = inputs()
    np.testing.assert_allclose(full(x), formula(x), rtol=1e-4, atol=1e-5)


def test_packed_documents_match_separate_rows():
    x = inputs()
    packed = np.asarray(full(x, span(0, SEQ, SEGMENTS)))
    for row, segments in enumerate(SEGMENTS):
        for segment in np.unique(segments):
            found = segments == segment
            alone = formula(x[row : row + 1, found])[0]
            np.testing.assert_allclose(packed[row, found], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_documents_have_no_gradient_from_each_other():
    fn, params, state = layer()
    second = SEGMENTS[0] == 8

    def objective(x):
        return jnp.square(call(fn, params, state, x, span(0, SEQ, SEGMENTS))[0][0, second]).sum()

    grad = np.asarray(jax.grad(objective)(inputs()))
    assert (grad[0, second] != 0).all()
    assert not grad[1].any()
    assert np.abs(grad[0, ~second]).max() < 1e-7 * np.abs(grad).max()  # the gradient of a running sum is rounded


@pytest.mark.parametrize("cuts", [[9], [4, 8, 12], range(1, SEQ)], ids=["2 pieces", "4 pieces", "tokens"])
def test_decoding_in_pieces_matches_the_full_pass(cuts):
    x = inputs()
    fn, params, state = layer(batch_size=2)
    found = []
    for start, stop in zip([0, *cuts], [*cuts, SEQ], strict=True):
        y, state = call(fn, params, state, x[:, start:stop], span(start, stop))
        found.append(y)
    np.testing.assert_allclose(np.concatenate(found, axis=1), full(x), rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("side", ["before", "after"])
def test_padding_changes_nothing(side):
    lengths, x = [2, 7], inputs()
    fn, params, state = layer(batch_size=2)
    place = np.arange(8)[None]
    starts = np.array([[0], [0]]) if side == "after" else 8 - np.array([[n] for n in lengths])
    index = place - starts
    valid = (index >= 0) & (index < np.array([[n] for n in lengths]))
    index = np.where(valid, index, 0)  # the index of padding has no meaning
    prompt = np.take_along_axis(x, np.clip(index, 0, SEQ - 1)[..., None], axis=1)
    prompt[~valid] = 100.0
    tokens = TokenInfo(index, index, None, valid)
    y, state = call(fn, params, state, prompt, tokens)
    np.testing.assert_allclose(y[valid], full(prompt, tokens)[valid], rtol=1e-4, atol=1e-5)
    after = np.array([[n] for n in lengths])
    step, _ = call(fn, params, state, np.take_along_axis(x, after[..., None], axis=1), TokenInfo(after, after))
    for row, length in enumerate(lengths):
        wanted = formula(x[row : row + 1, : length + 1])[0]
        np.testing.assert_allclose(y[row][valid[row]], wanted[:length], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(step[row, 0], wanted[length], rtol=1e-4, atol=1e-5)


def test_restarted_row_ignores_the_old_state():
    fn, params, state = layer(batch_size=2)
    _, used = call(fn, params, state, inputs(), span(0, SEQ))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(used))
    x = inputs(seed=1)
    np.testing.assert_array_equal(
        call(fn, params, used, x, span(0, SEQ))[0], call(fn, params, state, x, span(0, SEQ))[0]
    )


def test_bfloat16_compute_keeps_the_state_in_float32():
    types = ax.DTypes(compute=jnp.bfloat16)
    y = full(inputs(), cfg=CONFIG.set(dtypes=types))
    assert y.dtype == jnp.bfloat16
    wanted = formula(inputs())
    np.testing.assert_allclose(np.asarray(y, np.float64), wanted, rtol=0, atol=0.03 * np.abs(wanted).max())
    state = layer(CONFIG.set(dtypes=types), batch_size=2)[2]
    assert state["state"].dtype == jnp.float32 and state["x_conv"]["past"].dtype == jnp.bfloat16


def test_every_parameter_and_state_has_logical_axes():
    fn, params, state = layer(batch_size=2)
    assert fn.axes["x_proj"]["weight"] == ("embed", "head") and fn.axes["out_proj"]["weight"] == ("head", "embed")
    assert fn.axes["x_conv"] == {"weight": (None, "head"), "bias": ("head",)}
    assert fn.axes["A_log"] == fn.axes["dt_bias"] == fn.axes["D"] == fn.axes["norm"]["scale"] == ("head",)
    assert fn.state_axes["state"] == ("batch", None, "head", None, None)
    assert fn.state_axes["x_conv"]["past"] == ("batch", None, "head")
    for axes, arrays in ((fn.axes, params), (fn.state_axes, state)):
        jax.tree.map(
            lambda names, array: len(names) == array.ndim or pytest.fail(f"{names}"),
            axes,
            arrays,
            is_leaf=lambda node: isinstance(node, tuple),
        )


def test_initial_rates_and_steps_are_in_range():
    rates = np.exp(LogRates()(jax.random.key(0), (4000,), np.float32))
    assert rates.min() >= 1 and rates.max() <= 16 and abs(rates.mean() - 8.5) < 0.3
    steps = np.log1p(np.exp(np.asarray(StepBias()(jax.random.key(0), (4000,), np.float32), np.float64)))
    assert steps.min() > 0.00099 and steps.max() < 0.1001
    assert abs(np.log10(steps).mean() + 2) < 0.05  # log-uniform
    assert np.allclose(np.log1p(np.exp(StepBias(floor=0.05)(jax.random.key(0), (9,), np.float32))).min(), 0.05)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"head_dim": 5}, r"expand \* input_dim = 2 \* 6 is not a multiple of head_dim=5"),
        ({"num_groups": 3}, r"head_dim = 4, is not a multiple of num_groups=3"),
        ({"chunk": 0}, "chunk must be at least 1, not 0"),
        ({"conv_width": 0}, "conv_width must be at least 1"),
    ],
)
def test_invalid_configs_are_rejected(edit, message):
    with pytest.raises(ax.ConfigError, match=message):
        abstract(CONFIG.set(**edit))


def test_other_errors_name_the_value():
    with pytest.raises(ax.ConfigError, match=r"low must be at most high, not 2\.0 and 1\.0"):
        LogRates(low=2.0, high=1.0)
    with pytest.raises(ax.ConfigError, match="input_dim=6 is not a multiple of groups=4"):
        abstract(GatedRMSNorm.Config(input_dim=6, groups=4))
    fn, params, state = layer(batch_size=2)
    with pytest.raises(ax.ConfigError, match="keeps the state of batch_size=2 rows but was called with 3"):
        call(fn, params, state, inputs(batch=3), span(0, SEQ))
    with pytest.raises(ax.ConfigError, match="was given segment_ids while decoding"):
        call(fn, params, state, inputs(), span(0, SEQ, SEGMENTS))


def test_projections_are_slots():
    cfg = CONFIG.set(dt_proj=Linear.Config(use_bias=True))
    assert abstract(cfg)[1]["dt_proj"]["bias"].shape == (HEADS,)
