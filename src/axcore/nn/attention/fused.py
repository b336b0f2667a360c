"""The base of fused kernels, which have one program for the forward pass and one for the backward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, PyTree

from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.kernel import AttentionKernel
from axcore.nn.kv.views import Contiguous


@dataclasses.dataclass(frozen=True)
class FusedAttention:
    """softmax(scale q k^T) v as one differentiable function of arrays, made of two programs.

    The backward pass reads the heads and the lse. Both are tagged for remat policies ("heads", "lse"); with a policy
    that saves both, it does not rerun the forward program.

    Attributes:
        forward: `(form, q, k, v, operands, sinks) -> (heads, lse)`. The lse is float32 [batch, head, seq], the
            logarithm of the softmax's denominator, sinks included.
        backward: `(form, q, k, v, operands, heads, lse, heads_grad) -> (dq, dk, dv)`. `heads` and `lse` may include
            sinks, and keys that are not in `k`: with `p = exp(logits - lse)`, the gradient of the logits is
            `p * (heads_grad v^T - sum(heads * heads_grad))`.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]

    def __call__(
        self,
        form: Hashable,
        q: Float[Array, "batch seq head head_dim"],
        k: Float[Array, "batch kv_seq kv_head head_dim"],
        v: Float[Array, "batch kv_seq kv_head value_dim"],
        operands: PyTree[Array] = None,
        sinks: Float[Array, " head"] | None = None,
    ) -> tuple[Float[Array, "batch seq head value_dim"], Float32[Array, "batch head seq"]]:
        """The heads in the dtype of q, and the lse, which carries no gradient.

        To differentiate heads that are merged by lse, call `backward` with the merged results.

        Args:
            form: the static arguments of the programs.
            q, k, v: each kv head serves `head / kv_head` consecutive heads.
            operands: arrays without a gradient, such as segment ids.
            sinks: the logit of an additional key per head, whose value is zero (arXiv 2309.17453).
        """
        heads, lse = _differentiable(self, form, q, k, v, operands, sinks)
        return heads, jax.lax.stop_gradient(lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(
    programs: FusedAttention, form: Hashable, q: Array, k: Array, v: Array, operands: Any, sinks: Array | None
) -> tuple[Array, Array]:
    return _forward(programs, form, q, k, v, operands, sinks)[0]


def _forward(
    programs: FusedAttention, form: Hashable, q: Array, k: Array, v: Array, operands: Any, sinks: Array | None
) -> tuple[tuple[Array, Array], Any]:
    heads, lse = programs.forward(form, q, k, v, operands, sinks)
    # Tagged as [batch, seq, features], the shape that the output projection reads, so that the array is saved once.
    flat = checkpoint_name(heads.reshape(*heads.shape[:2], -1), "heads")
    lse = checkpoint_name(lse, "lse")
    return (flat.reshape(heads.shape), lse), (q, k, v, operands, sinks, flat, lse)


def _backward(
    programs: FusedAttention, form: Hashable, saved: Any, grads: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    q, k, v, operands, sinks, flat, lse = saved
    heads_grad = grads[0]
    heads = flat.reshape(heads_grad.shape)
    dq, dk, dv = programs.backward(form, q, k, v, operands, heads, lse, heads_grad)
    if sinks is None:
        return dq, dk, dv, None, None
    # A sink is a key whose value is zero: its gradient is p * (0 - sum(heads * heads_grad)).
    weight = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)
    return dq, dk, dv, None, -jnp.sum(weight * delta(heads, heads_grad), axis=(0, 2)).astype(sinks.dtype)


_differentiable.defvjp(_forward, _backward)


def delta(
    heads: Float[Array, "batch seq head value_dim"], heads_grad: Float[Array, "batch seq head value_dim"]
) -> Float32[Array, "batch head seq"]:
    """The sum of `heads * heads_grad` over the features of each head."""
    return jnp.sum(heads.astype(jnp.float32) * heads_grad.astype(jnp.float32), axis=-1).swapaxes(1, 2)


class FusedKernel(AttentionKernel):
    """Base of kernels that are a `FusedAttention`. A subclass sets `attention`, and implements `supports`, `form` and,
    if its programs read more arrays, `operands`."""

    attention: ClassVar[FusedAttention]

    tags_heads = True
    uses_dtypes = False

    def form(self, inputs: AttentionInputs) -> Hashable:
        """The static arguments of the programs."""
        raise NotImplementedError

    def operands(self, inputs: AttentionInputs) -> PyTree[Array]:
        """The arrays without a gradient that the programs read, such as segment ids."""
        return None

    def __call__(self, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
        """See `AttentionKernel`."""
        kv, form, operands = inputs.plain, self.form(inputs), self.operands(inputs)
        heads, lse = self.attention(form, inputs.q, kv.k, kv.v, operands, inputs.sinks)
        return heads, lse.swapaxes(1, 2) if inputs.return_lse else None

    def backward(self, inputs: AttentionInputs, heads: Heads, lse: LSE, heads_grad: Heads) -> AttentionInputs:
        """See `AttentionKernel`."""
        kv, form, operands = inputs.plain, self.form(inputs), self.operands(inputs)
        heads, heads_grad = (x.astype(inputs.q.dtype) for x in (heads, heads_grad))
        arrays = inputs.q, kv.k, kv.v, operands, heads, lse.swapaxes(1, 2), heads_grad
        dq, dk, dv = self.attention.backward(form, *arrays)
        nothing = jax.tree.map(lambda _: None, dataclasses.replace(inputs, kv=kv))
        # The merge computes the gradient of the sinks, which belong to no part of the keys.
        sinks = None if inputs.sinks is None else jnp.zeros_like(inputs.sinks)
        return nothing.replace(q=dq, kv=Contiguous(dk, dv, nothing.plain.tokens), sinks=sinks)
