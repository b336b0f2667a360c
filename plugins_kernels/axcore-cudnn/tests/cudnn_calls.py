"""The calls of cuDNN as formulas in JAX, which return NaN where the result of cuDNN is undefined."""

import jax
import jax.numpy as jnp


def logits_of(form, q, k, bias, lengths):
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    logits = form.scale * jnp.einsum("bthd,bshd->bhts", q, k)
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    allowed = jnp.ones((1, 1, *logits.shape[2:]), bool)
    if form.causal:
        allowed &= i >= j
    if form.window is not None:
        allowed &= i - j < form.window
    if lengths is not None:
        allowed &= (i < lengths[0][:, None, None, None]) & (j < lengths[1][:, None, None, None])
    if bias is not None:
        logits = logits + bias
    return jnp.where(allowed, logits, -jnp.inf)


def undefined(x, length):
    missing = jnp.arange(x.shape[1]) >= length[:, None]
    return jnp.where(missing.reshape(*missing.shape, *[1] * (x.ndim - 2)), jnp.nan, x)


def _forward(form, q, k, v, *, bias=None, lengths=None):
    logits = logits_of(form, q, k, bias, lengths)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])
    heads = jnp.einsum("bhts,bshd->bthd", weights, jnp.repeat(v, q.shape[2] // v.shape[2], axis=2))
    if lengths is None:
        return heads, lse
    return undefined(heads, lengths[0]), undefined(lse.swapaxes(1, 2), lengths[0]).swapaxes(1, 2)


def _backward(form, q, k, v, heads, lse, heads_grad, *, bias=None, lengths=None):
    group = q.shape[2] // k.shape[2]
    weights = jnp.exp(logits_of(form, q, k, bias, lengths) - lse[..., None])
    d_weights = jnp.einsum("bthd,bshd->bhts", heads_grad, jnp.repeat(v, group, axis=2))
    delta = jnp.sum(heads * heads_grad, axis=-1).swapaxes(1, 2)
    d_logits = form.scale * weights * (d_weights - delta[..., None])
    dq = jnp.einsum("bhts,bshd->bthd", d_logits, jnp.repeat(k, group, axis=2))
    dk, dv = jnp.einsum("bhts,bthd->bshd", d_logits, q), jnp.einsum("bhts,bthd->bshd", weights, heads_grad)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
    if lengths is None:
        return dq, dk, dv
    return undefined(dq, lengths[0]), undefined(dk, lengths[1]), undefined(dv, lengths[1])


def forward(form, q, k, v, *, bias=None, lengths=None, documents=None):
    """cuDNN's packed layout as documented: flat lists of lengths and offsets."""
    if documents is None:
        return _forward(form, q, k, v, bias=bias, lengths=lengths)
    heads, lse = _forward(form, *flat(q, k, v), bias=apart(documents, q))
    rows, offsets = listed(documents)
    seq = q.shape[1]
    by_document = jnp.pad(lse[0], ((0, 0), (0, seq)), constant_values=jnp.nan)
    stats = [jax.lax.dynamic_slice_in_dim(by_document, offsets[i], seq, axis=1) for i in range(rows.size)]
    stats = undefined(jnp.stack(stats).swapaxes(1, 2), rows).swapaxes(1, 2)
    return heads.reshape(*q.shape[:3], -1), stats


def backward(form, q, k, v, heads, lse, heads_grad, *, bias=None, lengths=None, documents=None):
    if documents is None:
        return _backward(form, q, k, v, heads, lse, heads_grad, bias=bias, lengths=lengths)
    _, offsets = listed(documents)
    tokens = q.shape[0] * q.shape[1]
    number = jnp.searchsorted(offsets, jnp.arange(tokens), side="right") - 1
    flat_lse = lse[number, :, jnp.arange(tokens) - offsets[number]].T[None]
    grads = _backward(form, *flat(q, k, v, heads), flat_lse, *flat(heads_grad), bias=apart(documents, q))
    return tuple(grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))


def flat(*arrays):
    return [x.reshape(1, -1, *x.shape[2:]) for x in arrays]


def listed(documents):
    lengths, offsets = documents
    return lengths.ravel(), offsets.ravel()[: lengths.size + 1]


def apart(documents, q):
    lengths, offsets = listed(documents)
    token = jnp.arange(q.shape[0] * q.shape[1])
    member = (token[:, None] >= offsets[:-1]) & (token[:, None] < offsets[:-1] + lengths)
    return jnp.where(member.astype(int) @ member.T.astype(int) > 0, 0.0, -jnp.inf)[None, None]
