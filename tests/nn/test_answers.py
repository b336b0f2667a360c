"""Results of kernels and caches are checked, since a wrong shape could broadcast silently."""

import jax
import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.module import functional
from axcore.nn import Attention, AttentionKernel, Contiguous, KVCache
from axcore.nn.attention.formula import dense_attention
from axcore.testing import tiny_batch, tiny_model


def asked(**slots):
    cfg = ax.select(tiny_model(), Attention).set(**slots)
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    return jax.eval_shape(lambda ids: fn(params, state, ids), tiny_batch()["inputs"])


@pytest.mark.parametrize(
    "result",
    [
        lambda heads: (heads[:1], None),
        lambda heads: (heads.astype(jnp.int32), None),
        lambda heads: (heads, jnp.zeros(heads.shape[:3])),
        lambda heads: heads,
        lambda heads: None,
    ],
    ids=["one row", "integers", "an unrequested lse", "no tuple", "nothing"],
)
def test_a_kernel_must_return_heads_that_fit(result):
    class Odd(AttentionKernel):
        def __call__(self, inputs):
            return result(dense_attention(inputs)[0])

    with pytest.raises(ax.ConfigError, match=r"attention\.kernel: Odd must return \(heads \(2, 8, 4, 4\) in float32"):
        asked(kernel=Odd.Config())


@pytest.mark.parametrize(
    "answer",
    [
        lambda inputs: inputs.replace(kv=Contiguous(inputs.plain.k[:1], inputs.plain.v[:1], inputs.query)),
        lambda inputs: inputs.replace(kv=Contiguous(inputs.plain.k, inputs.plain.v, inputs.query.part(0, 1))),
        lambda inputs: inputs.replace(kv=None),
        lambda inputs: inputs.q[:1],
        lambda inputs: None,
    ],
    ids=["one row", "one token for all keys", "no view", "heads of one row", "nothing"],
)
def test_a_cache_must_return_a_view_or_heads_that_fit(answer):
    class Odd(KVCache):
        def __call__(self, inputs):
            return answer(inputs)

    with pytest.raises(ax.ConfigError, match=r"attention: the cache Odd must return"):
        asked(cache=Odd.Config())


def test_takes_and_the_result_of_supports_are_checked():
    with pytest.raises(ax.ConfigError, match=r"Typo.takes must be a set of .*softcap.*not \{'soft_cap'\}"):
        type("Typo", (AttentionKernel,), {"takes": {"soft_cap"}})
    yes = type("Yes", (AttentionKernel,), {"supports": lambda self, request: True})
    with pytest.raises(ax.ConfigError, match=r"Yes\.supports must return None or a reason, not True"):
        asked(kernel=yes.Config())
