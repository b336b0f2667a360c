"""The inputs of attention kernels: queries, a view of keys and values, and the options of the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from axcore.module import Frame, current, root
from axcore.nn.attention.masks import Mask
from axcore.nn.kv.views import Contiguous, KVView
from axcore.nn.tokens import CachedRows, Phase, TokenInfo

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bias:
    """A layer that adds to the logits, as a pytree: its arrays pass through JAX transforms together with the inputs.

    Attributes:
        state: the arrays of the layer.
        heads: indices of the heads of this call among all heads of the layer; None: all.
        graphdef: the layer without its arrays.
        path: path of the layer, for error messages.
    """

    state: nnx.State[Hashable, object]
    heads: Int[Array, " head"] | None
    graphdef: nnx.GraphDef[nnx.Module] = dataclasses.field(metadata=_STATIC)
    path: tuple[str, ...] = dataclasses.field(metadata=_STATIC)

    @classmethod
    def of(cls, layer: nnx.Module, frame: Frame, name: str) -> Bias:
        """The bias computed by `layer`, the child `name` of the layer that `frame` belongs to."""
        graphdef, state = nnx.split(layer)
        return cls(state, None, graphdef, tuple(frame.below(name).split(".")))

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Float[Array, "batch_or_1 head query key"]:
        """The float32 terms that are added to the logits, for any subset of the queries and keys."""
        layer = nnx.merge(self.graphdef, self.state)
        with root(layer, key=None, training=current().mode, collect=False, names=self.path):
            found: jax.Array = layer(query, key)
        return found if self.heads is None else found[:, self.heads]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights, as a function of the global row, head, query index and key index.

    The mask therefore does not depend on how rows, heads, queries and keys are sharded or split into blocks.

    Attributes:
        key: PRNG key of this call.
        rows, heads: global indices of the rows and heads of this call; None: 0, 1, ...
        rate: probability of zeroing a weight.
    """

    key: PRNGKeyArray
    rows: Int[Array, " batch"] | None
    heads: Int[Array, " head"] | None
    rate: float = dataclasses.field(metadata=_STATIC)

    def keep(self, query: TokenInfo, key: TokenInfo, shape: tuple[int, int]) -> Bool[Array, "batch head query key"]:
        """True for the weights that are kept. The caller scales them by `1 / (1 - rate)`.

        Args:
            shape: (batch, number of heads).
        """
        batch, num_heads = shape
        rows = jnp.arange(batch) if self.rows is None else self.rows
        heads = jnp.arange(num_heads) if self.heads is None else self.heads
        words = jax.random.bits(self.key, (2,), jnp.uint32)
        queries = _hash(words, rows[:, None, None] * 65_536 + heads[:, None], query.index[:, None, :])
        bits = _hash(words[::-1], queries[..., None], key.index[:, None, None, :])
        return bits >= np.uint32(min(self.rate * 2**32, 2**32 - 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one attention call, as a pytree. Fields that are not arrays are static.

    Attributes:
        q: queries, not scaled.
        kv: keys and values; each kv head serves `head / kv_head` consecutive heads. None if the attention computes none
            and its cache provides them.
        query: positions and segments of the queries. Those of the keys are `kv.tokens`.
        sinks: for each head, the logit of an additional key without a value (gpt-oss; Xiao et al. 2023, arXiv
            2309.17453).
        bias: added to the logits after `softcap`.
        dropout: dropout of the attention weights; None unless training.
        cached: the rows of a KV cache, with their lengths and page tables; None without a cache. Kernels do
            not need it: the view contains the position of each key.
        scale: multiplies the logits.
        mask: which of the valid keys a query sees.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2, arXiv 2408.00118, section 2).
        phase: without a KV cache, prefill or decoding.
        training: whether the call is part of a training step.
        return_lse: whether the kernel returns the log-sum-exp of each query's logits.
    """

    q: Float[Array, "batch query head head_dim"]
    kv: KVView | None
    query: TokenInfo
    sinks: Float[Array, " head"] | None = None
    bias: Bias | None = None
    dropout: Dropout | None = None
    cached: CachedRows | None = None
    scale: float = dataclasses.field(kw_only=True, metadata=_STATIC)
    mask: Mask = dataclasses.field(kw_only=True, metadata=_STATIC)
    softcap: float | None = dataclasses.field(default=None, kw_only=True, metadata=_STATIC)
    phase: Phase = dataclasses.field(default="train", kw_only=True, metadata=_STATIC)
    training: bool = dataclasses.field(default=False, kw_only=True, metadata=_STATIC)
    return_lse: bool = dataclasses.field(default=False, kw_only=True, metadata=_STATIC)

    @property
    def keys(self) -> KVView:
        """`kv`, for callers that require it to be given."""
        assert self.kv is not None
        return self.kv

    @property
    def plain(self) -> Contiguous:
        """`kv` as plain arrays. Copies nothing for a kernel whose `views` contain only `Contiguous`."""
        return self.keys.gathered()

    def replace(self, **changes: Any) -> AttentionInputs:
        """A copy with these fields replaced."""
        return dataclasses.replace(self, **changes)


Heads = Float[Array, "batch query head value_dim"]
LSE = Float[Array, "batch query head"]


def _hash(words: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """uint32 random bits for each pair of integers (threefry), in the broadcast shape of the two."""
    first, second = jnp.broadcast_arrays(first.astype(jnp.uint32), second.astype(jnp.uint32))
    bits: jax.Array = threefry2x32_p.bind(words[0], words[1], first, second)[0]  # elementwise, so it keeps shardings
    return bits


def isolate_nan(
    k: Float[Array, "*token head_dim"], v: Float[Array, "*token value_dim"]
) -> tuple[Float[Array, "*token head_dim"], Float[Array, "*token value_dim"]]:
    """Moves NaN and infinity from values to keys: a value that is not finite becomes 0, and the key of its token NaN.

    Queries that see the token still get NaN. In a KV cache, NaN in the value would also reach queries that do not see
    it, such as those of the next row in the slot, because an attention weight of 0 times NaN is NaN.
    """
    is_finite = jnp.isfinite(v)
    fine = is_finite if k.shape == v.shape else is_finite.all(axis=-1, keepdims=True)
    return jnp.where(fine, k, jnp.nan), jnp.where(is_finite, v, 0)
