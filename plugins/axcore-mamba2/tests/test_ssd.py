"""The chunked form against the recurrence, one token at a time in NumPy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore_mamba2.ssd import ssd

BATCH, HEADS, HEAD_DIM, GROUPS, STATE_DIM = 2, 4, 3, 2, 5


def recurrence(x, dt, A, B, C, state, documents=None):
    x, dt, A, B, C, state = (np.asarray(each, np.float64) for each in (x, dt, A, B, C, state))
    B, C = (np.repeat(each, x.shape[2] // each.shape[2], axis=2) for each in (B, C))
    y, number = np.zeros_like(x), np.zeros(len(x), int)
    for t in range(x.shape[1]):
        if documents is not None:
            state = np.where((documents[:, t] == number)[:, None, None, None], state, 0.0)
            number = documents[:, t]
        decay = np.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + np.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        y[:, t] = np.einsum("bhpn,bhn->bhp", state, C[:, t])
    return y, state


def arguments(seq, seed=0, low=0.01, high=1.0):
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
    dt = np.exp(random.uniform(np.log(low), np.log(high), size=(BATCH, seq, HEADS))).astype(np.float32)
    A = -np.linspace(0.5, 8.0, HEADS, dtype=np.float32)
    B, C = normal(BATCH, seq, GROUPS, STATE_DIM), normal(BATCH, seq, GROUPS, STATE_DIM)
    return normal(BATCH, seq, HEADS, HEAD_DIM), dt, A, B, C, normal(BATCH, HEADS, HEAD_DIM, STATE_DIM)


@functools.partial(jax.jit, static_argnames="chunk")
def run(x, dt, A, B, C, state, documents=None, *, chunk):
    return ssd(x, dt, A, B, C, chunk, state, documents)


def close(found, wanted, tolerance=2e-6):
    for each, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(each, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(("seq", "chunk"), [(1, 4), (11, 1), (11, 4), (12, 4), (5, 16)])
def test_any_chunk_size_matches_the_recurrence(seq, chunk):
    given = arguments(seq)
    close(run(*given, chunk=chunk), recurrence(*given))


def test_state_resets_between_documents():
    given = arguments(12)
    # The first row continues the initial state, and its document 1 spans a whole chunk. The second starts a document.
    documents = np.array([[0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]], np.int32)
    found = run(*given, documents, chunk=4)
    close(found, recurrence(*given, documents))
    close(found, run(*given, documents, chunk=12))


def test_large_values_do_not_leak_between_documents():
    x, dt, A, B, C, state = arguments(8)
    documents = np.repeat([[1, 2]], 4, axis=1).repeat(BATCH, axis=0).astype(np.int32)
    clean, _ = run(x, dt, A, B, C, state, documents, chunk=3)
    spoilt, _ = run(x, np.where(np.arange(8)[:, None] < 4, 1e30, dt), A, B, C, state * 1e30, documents, chunk=3)
    np.testing.assert_array_equal(spoilt[:, 4:], clean[:, 4:])


def test_decays_between_small_steps_are_exact_after_large_ones():
    given = list(arguments(128))
    given[1] = np.where(np.arange(128)[:, None] < 64, 10.0, 1e-3).astype(np.float32) * np.ones_like(given[1])
    close(run(*given, chunk=128), recurrence(*given), 1e-6)  # with plain float32 sums, the error is 2e-4


def test_gradients_match_finite_differences():
    given, seq = arguments(11), 11
    documents = np.array([[0] * 7 + [1] * 4, [1] * 3 + [2] * 8], np.int32)
    random = np.random.default_rng(1)
    weights = random.normal(size=given[0].shape), random.normal(size=given[5].shape)

    def objective(function, *args):
        return sum((weight * output).sum() for weight, output in zip(weights, function(*args), strict=True))

    grads = jax.jit(jax.grad(functools.partial(objective, lambda *args: ssd(*args[:5], 4, *args[5:])), range(6)))(
        *given, documents
    )
    exact = [np.asarray(each, np.float64) for each in given]
    for number, grad in enumerate(grads):
        for _ in range(3):
            way = random.normal(size=grad.shape)
            ends = [[*exact[:number], exact[number] + step * way, *exact[number + 1 :]] for step in (-1e-6, 1e-6)]
            low, high = (objective(recurrence, *end, documents) for end in ends)
            size = np.sqrt(np.square(np.asarray(grad)).sum())
            np.testing.assert_allclose((grad * way).sum(), (high - low) / 2e-6, rtol=0, atol=1e-5 * size)
    assert seq % 4  # so the last chunk is padded


def test_bfloat16_keeps_the_state_in_float32():
    x, dt, A, B, C, state = arguments(64, low=1e-3, high=1e-2)  # the state is a sum of all tokens
    x, B, C = (jnp.asarray(each, jnp.bfloat16) for each in (x, B, C))
    y, after = run(x, dt, A, B, C, state, chunk=8)
    assert y.dtype == after.dtype == jnp.float32
    # Each product rounds its factors once, by at most 2**-9. A bfloat16 state would also be rounded in each chunk.
    close((y, after), recurrence(x, dt, A, B, C, state), 2**-8)
    assert np.asarray(after != after.astype(jnp.bfloat16)).any()


def test_flops_are_linear_in_seq():
    def flops(seq):
        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arguments(seq)]
        return jax.jit(functools.partial(run, chunk=64)).lower(*shapes).cost_analysis()["flops"]

    assert 1.8 < flops(2048) / flops(1024) < 2.05
