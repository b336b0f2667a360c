"""The documented contract of the attention kernels in AWS's nkilib (Neuron SDK 2.31 and later), in NumPy float64.

`attention_cte` and `attention_bwd` have the signatures, defaults, layouts and preconditions of the library, and are
written from its documentation, not from the adapter. They differ from the kernels in precision: they round only results
(and the lse, where `attention_bwd` keeps it in the dtype of q).
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np

TILE = 128


def attention_cte(
    q,
    k,
    v,
    scale=1.0,
    causal_mask=True,
    k_prior=None,
    v_prior=None,
    prior_used_len=None,
    sink=None,
    sliding_window=None,
    tp_q=True,
    tp_k=False,
    tp_out=False,
    cache_softmax=False,
    softmax_dtype="float32",
    mm_out_dtype="float32",
    cp_offset=None,
    global_cp_deg=None,
    cp_strided_q_slicing=False,
    bound_min=None,
    bound_max=None,
    cp_striped_input=False,
    skip_output_normalization=False,
    position_bias=None,
    bias_layout="dense",
    bias_band_params=None,
):
    """Forward pass; rows and heads are one dimension."""
    unmodelled = (k_prior, v_prior, prior_used_len, cp_offset, global_cp_deg, position_bias, bias_band_params)
    assert all(each is None for each in unmodelled)
    assert not (cp_strided_q_slicing or cp_striped_input or skip_output_normalization)
    assert (softmax_dtype, mm_out_dtype, bias_layout) == ("float32", "float32", "dense")
    batch, (seq, dim) = q.shape[0], q.shape[1:] if tp_q else q.shape[:0:-1]
    kv_batch, kv_seq = v.shape[:2]
    assert v.shape == (kv_batch, kv_seq, dim)
    assert k.shape == ((kv_batch, kv_seq, dim) if tp_k else (kv_batch, dim, kv_seq))
    assert q.dtype == k.dtype == v.dtype == jnp.bfloat16, "products are in bfloat16"
    assert batch <= 512
    assert batch % kv_batch == 0
    assert max(seq, kv_seq) <= 131_072
    assert 0 < dim <= 128
    window = sliding_window or 0
    assert window >= 0
    assert causal_mask or not window, "a window requires the causal mask"
    assert (bound_min is None) == (bound_max is None)
    assert scale == 1.0 or (not window and bound_min is None), "range_select supports no scale"
    if bound_min is not None:
        assert bound_min.shape == bound_max.shape == (batch, seq, 1)
        assert bound_min.dtype == bound_max.dtype == jnp.float32
        assert seq % TILE == 0
    if sink is not None:
        assert (sink.shape, sink.dtype) == ((batch, 1), jnp.float32)
    if cache_softmax:
        assert seq % TILE == 0

    def run(q, k, v, sink, bound_min, bound_max):
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        q, k = q if tp_q else q.swapaxes(1, 2), k.swapaxes(1, 2) if tp_k else k
        k, v = (np.repeat(x, batch // kv_batch, axis=0) for x in (k, v))
        low, high = (None if x is None else np.asarray(x, np.float64) for x in (bound_min, bound_max))
        logits = np.where(visible(seq, kv_seq, causal_mask, window, low, high), scale * (q @ k), -np.inf)
        if sink is not None:
            logits = np.concatenate([logits, np.tile(np.asarray(sink, np.float64)[:, None], (1, seq, 1))], axis=-1)
        highest = logits.max(-1, keepdims=True)
        terms = np.exp(logits - highest)
        total = terms.sum(-1, keepdims=True)
        out = (terms / total)[..., :kv_seq] @ v
        columns = (x.reshape(batch, seq // TILE, TILE).swapaxes(1, 2) for x in (-highest, 1 / total))
        found = (out.swapaxes(1, 2) if tp_out else out, *columns)
        return rounded(found if cache_softmax else found[:1], form)

    shape = (batch, dim, seq) if tp_out else (batch, seq, dim)
    cached = jax.ShapeDtypeStruct((batch, TILE, seq // TILE), jnp.float32)
    form = (jax.ShapeDtypeStruct(shape, q.dtype), *[cached] * (2 if cache_softmax else 0))
    found = jax.pure_callback(run, form, q, k, v, sink, bound_min, bound_max)
    return found if cache_softmax else found[0]


def attention_bwd(
    q_ref,
    k_ref,
    v_ref,
    o_ref,
    dy_ref,
    lse_ref,
    sinks_ref=None,
    bound_min=None,
    bound_max=None,
    use_causal_mask=False,
    mixed_precision=False,
    softmax_scale=None,
    sliding_window=None,
    transpose_dv=False,
    cp_offset=0,
):
    """Backward pass; all arrays are [batch, head, features, seq]."""
    assert sinks_ref is None
    assert not transpose_dv
    assert not cp_offset
    batch, heads, dim, seq = q_ref.shape
    _, kv_heads, _, kv_seq = k_ref.shape
    assert heads % kv_heads == 0
    assert k_ref.shape == v_ref.shape == (batch, kv_heads, dim, kv_seq)
    assert o_ref.shape == dy_ref.shape == q_ref.shape
    assert lse_ref.shape == (batch, heads, TILE, seq // TILE)
    assert lse_ref.dtype == jnp.float32
    assert q_ref.dtype == k_ref.dtype == v_ref.dtype == o_ref.dtype == dy_ref.dtype
    assert seq == kv_seq or not use_causal_mask
    assert seq % TILE == 0
    tile = min(512, kv_seq)
    assert kv_seq % tile == 0
    assert tile % TILE == 0
    assert 8192 % tile == 0
    assert dim <= TILE or dim % -(-dim // TILE) == 0
    window = sliding_window or 0
    assert use_causal_mask or not window, "a window requires the causal mask"
    assert (bound_min is None) == (bound_max is None)
    if bound_min is not None:
        assert bound_min.shape == bound_max.shape == (batch, seq)
        assert bound_min.dtype == bound_max.dtype == jnp.float32
    dtype, scale = q_ref.dtype, softmax_scale or dim**-0.5

    def run(q, k, v, o, dy, lse, bound_min, bound_max):
        lse = np.asarray(lse if mixed_precision else np.asarray(lse).astype(dtype), np.float64)
        q, k, v, o, dy = (np.asarray(x, np.float64) for x in (q, k, v, o, dy))
        group = heads // kv_heads
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        low, high = (None if x is None else np.asarray(x, np.float64)[:, None, :, None] for x in (bound_min, bound_max))
        allowed = visible(seq, kv_seq, use_causal_mask, window, low, high)
        logits = scale * np.einsum("bhdi,bhdj->bhij", q, k)
        # Tile column c of partition p holds the token c * 128 + p.
        flat = lse.transpose(0, 1, 3, 2).reshape(batch, heads, seq, 1)
        weights = np.exp(np.where(allowed, logits, -np.inf) - flat)
        delta = (o * dy).sum(2)[..., None]
        of_logits = weights * (np.einsum("bhdi,bhdj->bhij", dy, v) - delta)
        dq = scale * np.einsum("bhij,bhdj->bhdi", of_logits, k)
        dk = scale * np.einsum("bhij,bhdi->bhdj", of_logits, q)
        dv = np.einsum("bhij,bhdi->bhdj", weights, dy)
        dk, dv = (x.reshape(batch, kv_heads, group, dim, kv_seq).sum(2) for x in (dk, dv))
        return rounded((dq, dk, dv), form)

    form = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_ref, k_ref, v_ref))
    return jax.pure_callback(run, form, q_ref, k_ref, v_ref, o_ref, dy_ref, lse_ref, bound_min, bound_max)


def visible(seq, kv_seq, causal, window, low, high):
    """True where the query (second to last axis) sees the key (last axis)."""
    i, j = np.arange(seq)[:, None], np.arange(kv_seq)
    allowed = np.ones((seq, kv_seq), bool)
    if causal:
        allowed = allowed & (j <= i)
    if window:
        allowed = allowed & (j > i - window)
    if low is not None:
        allowed = allowed & (j >= low) & (j < high)
    return allowed


def rounded(found, form):
    return tuple(x.astype(each.dtype) for x, each in zip(found, form, strict=True))


@dataclasses.dataclass
class Kernel:
    """A function decorated with `nki.jit`: `kernel[cores](...)`, where the LNC degree is 1 or 2."""

    function: object
    launches: list = dataclasses.field(default_factory=list)

    def __getitem__(self, cores):
        assert cores in (1, 2)
        self.launches.append(cores)
        return self.function


def modules():
    """Module name -> stand-in for the module of nkilib."""
    kernels = {"attention_cte": Kernel(attention_cte), "attention_bwd": Kernel(attention_bwd)}
    return {f"nkilib.core.attention.{name}": types.SimpleNamespace(**{name: each}) for name, each in kernels.items()}
