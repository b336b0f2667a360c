"""What one attention asks: queries, a view of keys and values, and everything between them and the heads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from axcore.module import Frame, current, root
from axcore.nn.attention.masks import Mask
from axcore.nn.kv.views import Contiguous, KVView
from axcore.nn.tokens import CachedRows, Phase, TokenInfo

_STATIC: Any = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bias:
    """A layer that adds to the logits, as a pytree: its arrays travel with the inputs into any transform.

    Attributes:
        state: the layer's arrays.
        heads: which heads these inputs have of all that the layer knows; None: all.
    """

    state: Any
    heads: Int[Array, " head"] | None
    graphdef: Any = dataclasses.field(metadata=_STATIC)
    path: tuple[str, ...] = dataclasses.field(metadata=_STATIC)
    """Where the layer is, for errors."""

    @classmethod
    def of(cls, layer: nnx.Module, frame: Frame, name: str) -> Bias:
        """Of a child of the layer whose frame it is."""
        graphdef, state = nnx.split(layer)
        return cls(state, None, graphdef, tuple(frame.below(name).split(".")))

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Float[Array, "batch_or_1 head query key"]:
        """Summands of the logits in float32, for any part of the queries and keys."""
        layer = nnx.merge(self.graphdef, self.state)
        with root(layer, key=None, training=current().training, collect=False, names=self.path):
            found: jax.Array = layer(query, key)
        return found if self.heads is None else found[:, self.heads]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Which attention weights are zeroed: a function of where query and key stand in the whole batch.

    So the bits do not depend on how rows, heads, queries or keys are spread over devices or cut into blocks.

    Attributes:
        rate: the chance of each weight to be zeroed.
        rows, heads: the numbers of these rows and heads among all; None: counted from 0.
    """

    key: PRNGKeyArray
    rows: Int[Array, " batch"] | None
    heads: Int[Array, " head"] | None
    rate: float = dataclasses.field(metadata=_STATIC)

    def keep(self, query: TokenInfo, key: TokenInfo, shape: tuple[int, int]) -> Bool[Array, "batch head query key"]:
        """Which weights are kept; they are to be scaled by `1 / (1 - rate)`.

        Args:
            shape: (batch, head).
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
    """One call of an attention kernel. A pytree; what is not an array is static.

    Attributes:
        q: queries, not scaled.
        kv: keys and values; each kv head serves `head / kv_head` consecutive heads. None where the attention computes
            none and its cache brings them.
        query: where the queries stand. Keys stand where `kv.tokens` says.
        scale: of the logits.
        mask: which keys a query may see, of those that exist.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2, arXiv 2408.00118, section 2).
        sinks: the logit of one more key for each head, which has no value (gpt-oss; Xiao et al. 2023, arXiv
            2309.17453).
        bias: what is added to the logits, after `softcap`.
        dropout: which weights are zeroed while training.
        cached: the rows that a KV cache keeps, with their lengths and page tables; None without one. For the cache: a
            kernel finds all that it needs in the view.
        phase: what the call is part of.
        return_lse: whether the log-sum-exp of each query's logits is wanted.
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
    return_lse: bool = dataclasses.field(default=False, kw_only=True, metadata=_STATIC)

    @property
    def keys(self) -> KVView:
        """`kv` of a call that has keys."""
        assert self.kv is not None
        return self.kv

    @property
    def plain(self) -> Contiguous:
        """`kv` as plain arrays. A kernel that lists no other view gets them without a copy."""
        return self.keys.gathered()

    def replace(self, **changes: Any) -> AttentionInputs:
        return dataclasses.replace(self, **changes)


Heads = Float[Array, "batch query head value_dim"]
LSE = Float[Array, "batch query head"]


def _hash(words: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """uint32 bits for each pair of numbers (threefry), of the shape that the two broadcast to."""
    first, second = jnp.broadcast_arrays(first.astype(jnp.uint32), second.astype(jnp.uint32))
    both = threefry_2x32((words[0], words[1]), jnp.concatenate([first.ravel(), second.ravel()]))
    return both[: first.size].reshape(first.shape)
