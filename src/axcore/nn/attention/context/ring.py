"""Context parallelism that passes keys and values around a ring of devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

from axcore.module import custom_vjp
from axcore.nn.attention.context.hops import Hop, PartialCall, balances, hops_of
from axcore.nn.attention.context.zigzag import from_zigzag, to_zigzag
from axcore.nn.attention.formula import LOWEST
from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.kernel import AttentionKernel
from axcore.nn.attention.merging import merge_by_lse, sinks_gradient
from axcore.nn.attention.request import OPTIONS, KernelRequest
from axcore.nn.kv.views import Contiguous
from axcore.parallel import ContextParallelism

Residuals = tuple[AttentionInputs, Heads, LSE]


class RingAttention(ContextParallelism):
    """Keys and values are passed around a ring of devices. In each hop, each device computes the attention of its
    queries to the keys that it holds (Liu et al. 2023, arXiv 2310.01889).

    The partial results are merged by log-sum-exp. The backward pass sends keys and values around the ring again, with
    their gradients. In a causal call, parts that no query sees are not computed, and a sliding window limits the number
    of hops. The kernel must take `lse`. It gets a causal mask only if queries and keys are the same tokens, since the
    keys of all other calls are earlier than the queries.
    """

    tags_heads: ClassVar[bool] = True

    class Config(ContextParallelism.Config):
        balanced: bool = True
        """Whether the devices exchange halves of their tokens before and after a causal call, so that each has one half
        from the start and one from the end of the row, and all have equal work (Llama 3, arXiv 2407.21783, section
        3.3.2). The number of tokens on each device must then be even. A call whose window limits the number of hops is
        balanced without an exchange."""

    config: Config

    def refusal(self, request: KernelRequest, shards: int) -> str | None:
        """See `ContextParallelism`."""
        if request.query_len % 2 and balances(request, shards, self.config.balanced):
            return (
                f"and balanced=True requires an even number of tokens on each device, got {request.query_len}. Make "
                f"the sequence length a multiple of {2 * shards}, or set balanced=False"
            )
        return None

    def requests(self, request: KernelRequest, shards: int) -> tuple[KernelRequest, ...]:
        """See `ContextParallelism`."""
        hops = hops_of(request, shards, self.config.balanced)
        used = {*request.options, "lse"} - {"sinks"}
        options = tuple(name for name in OPTIONS if name in used)
        calls = (call.request(request) for hop in hops for call in (*hop.earlier, *hop.later))
        return tuple(dict.fromkeys(dataclasses.replace(call, options=options) for call in calls))

    def attend(
        self, kernel: AttentionKernel, inputs: AttentionInputs, axes: tuple[str, ...], shards: int
    ) -> tuple[Heads, LSE | None]:
        """See `ContextParallelism`."""
        request, balanced = KernelRequest.of(inputs), self.config.balanced
        ring = _Ring(kernel, hops_of(request, shards, balanced), axes, shards)
        run = custom_vjp(ring.run, ring.forward, ring.backward)
        if balances(request, shards, balanced):
            q, kv = to_zigzag((inputs.q, inputs.plain), axes, shards)
            heads, lse = from_zigzag(run(inputs.replace(q=q, kv=kv, query=kv.tokens)), axes, shards)
        else:
            heads, lse = run(inputs)
        return heads, lse if inputs.return_lse else None


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Attention on one device, and its gradient. The log-sum-exps of kernels carry no gradient, so the merge is not
    differentiated. Instead, `AttentionKernel.backward` takes the merged results."""

    kernel: AttentionKernel
    hops: tuple[Hop, ...]
    axes: tuple[str, ...]
    shards: int

    def run(self, inputs: AttentionInputs) -> tuple[Heads, LSE]:
        """Heads and log-sum-exp."""

        def merged(kv: Contiguous, so_far: tuple[Heads, LSE], call: PartialCall) -> tuple[Heads, LSE]:
            heads, lse = self.kernel(call.inputs(inputs.replace(kv=kv)))
            assert lse is not None  # since return_lse is set
            return call.queries.put(so_far, merge_by_lse([call.queries.of(so_far), (heads, lse)]))

        kv, shape = inputs.plain, (*inputs.q.shape[:3], inputs.keys.value_dim)
        found = jnp.zeros(shape, jnp.float32), jnp.full(shape[:3], LOWEST, jnp.float32)
        for number, hop in enumerate(self.hops):  # unrolled, so that the compiler can overlap the exchanges
            kv = self._shifted(kv) if number else kv
            found = self._calls(number, hop, functools.partial(merged, kv), found)
        heads, lse = merge_by_lse([found], inputs.sinks)
        return checkpoint_name(heads.astype(inputs.q.dtype), "heads"), checkpoint_name(lse, "lse")

    def forward(self, inputs: AttentionInputs) -> tuple[tuple[Heads, LSE], Residuals]:
        heads, lse = self.run(inputs)
        return (heads, lse), (inputs, heads, lse)

    def backward(self, residuals: Residuals, grads: tuple[Heads, LSE]) -> tuple[AttentionInputs]:
        inputs, results = residuals[0], (residuals[1], residuals[2], grads[0])

        def added(kv: Contiguous, total: _Gradients, call: PartialCall) -> _Gradients:
            part = call.inputs(inputs.replace(kv=kv))
            return total.plus(call, self.kernel.backward(part, *call.queries.of(results)))

        kv, total = inputs.plain, _Gradients.zeros(inputs)
        for number, hop in enumerate(self.hops):
            if number:
                kv, k, v = self._shifted((kv, total.k, total.v))
                total = total._replace(k=k, v=v)
            total = self._calls(number, hop, functools.partial(added, kv), total)
        k, v = self._shifted((total.k, total.v), 1 - len(self.hops))
        found = total._replace(k=k, v=v).of(inputs)
        if inputs.sinks is not None:
            found = found.replace(sinks=sinks_gradient(inputs.sinks, *results))
        return (found,)

    def _shifted(self, arrays: PyTree, places: int = 1) -> PyTree:
        """Receives the arrays of the device that is `places` places before this one in the ring."""
        moves = [(source, (source + places) % self.shards) for source in range(self.shards)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, moves), arrays)

    def _calls[S](self, number: int, hop: Hop, step: Callable[[S, PartialCall], S], state: S) -> S:
        """The state after the calls of a hop."""
        if hop.earlier == hop.later:
            return functools.reduce(step, hop.earlier, state)
        is_earlier = jax.lax.axis_index(self.axes) >= number
        branches = (functools.partial(functools.reduce, step, calls) for calls in hop)
        found: S = jax.lax.cond(is_earlier, *branches, state)
        return found


class _Gradients(NamedTuple):
    """float32 sums of the gradients that kernel calls return. `bias` has None for arrays without a gradient."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: PyTree

    @classmethod
    def zeros(cls, inputs: AttentionInputs) -> _Gradients:
        def zeros(x: jax.Array) -> jax.Array | None:
            return jnp.zeros(x.shape, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else None

        kv = inputs.plain
        return cls(*jax.tree.map(zeros, (inputs.q, kv.k, kv.v, inputs.bias)))

    def plus(self, call: PartialCall, found: AttentionInputs) -> _Gradients:
        q = call.queries.put(self.q, call.queries.of(self.q) + found.q)
        k, v = call.keys.put(
            (self.k, self.v), (call.keys.of(self.k) + found.plain.k, call.keys.of(self.v) + found.plain.v)
        )

        def plus(total: jax.Array | None, each: jax.Array | None) -> jax.Array | None:
            return total if total is None or each is None else total + each

        return _Gradients(q, k, v, jax.tree.map(plus, self.bias, found.bias, is_leaf=lambda x: x is None))

    def of(self, inputs: AttentionInputs) -> AttentionInputs:
        """The gradients of these inputs, in their dtypes."""
        kv, nothing = inputs.plain, jax.tree.map(lambda _: None, inputs)

        def cast(x: jax.Array, total: jax.Array | None) -> jax.Array | None:
            return None if total is None else total.astype(x.dtype)

        q, k, v, bias = jax.tree.map(cast, (inputs.q, kv.k, kv.v, inputs.bias), tuple(self))
        found: AttentionInputs = nothing.replace(q=q, kv=dataclasses.replace(nothing.plain, k=k, v=v), bias=bias)
        return found
