"""The base of KV caches, and the function that prepares the config of a model for decoding."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from axcore.config import REQUIRED, Config, ConfigError, has_field
from axcore.config.tree import REMOVED, transform
from axcore.module import ContextError, DecodingState, Layer, current
from axcore.nn.attention.inputs import AttentionInputs, Heads
from axcore.nn.kv.paging import Paging
from axcore.nn.tokens import CachedRows


class KVCache(Layer):
    """Base of the layers that fill the cache slot of attention. A cache chooses the memory layout of keys and values.

    It stores them in `DecodingState`, which `axcore.infer.Decoder` passes in and out as one donated pytree.
    """

    class Config(Layer.Config):
        """The config of a cache. Attention passes `input_dim`, `num_heads`, `num_kv_heads`, `head_dim` and `value_dim`
        to it if it declares these fields."""

        @property
        def paging(self) -> Paging | None:
            """The pool of pages of the cache in a model for decoding; None if it has no pages."""
            return None

        @property
        def max_rollback(self) -> int | None:
            """The largest number of last tokens of a row that the next step may replace; None: any number."""
            return None

    def __call__(self, inputs: AttentionInputs) -> AttentionInputs | Heads:
        """Stores the keys and values of this call, and returns a view of all stored keys and values.

        Args:
            inputs: `kv` contains the new keys and values as a `Contiguous` view; it is None if the attention computes
                none.

        Returns:
            `inputs` with `kv` replaced by a view of all stored keys and values, which the kernel of the attention
            reads. A cache that computes attention itself returns the heads instead; it must apply every option of
            `inputs`.
        """
        raise NotImplementedError

    def answer(self, inputs: AttentionInputs) -> AttentionInputs | Heads:
        """Calls the cache and checks the result.

        Raises:
            ConfigError: the result is neither heads nor inputs with a view that fits the queries.
        """
        found = self(inputs)
        batch, seq, heads, _ = inputs.q.shape
        if isinstance(found, AttentionInputs):
            kv = found.kv
            if kv is not None:
                rows, length, kv_heads, _ = kv.shape
                where = kv.tokens.index.shape
                if rows == batch and heads % kv_heads == 0 and where[0] in (1, batch) and where[1] == length:
                    return found
            shown = "no view" if kv is None else f"{type(kv).__name__} of shape {kv.shape}, tokens {where}"
            wanted = f"a view of {batch} rows whose kv heads divide {heads}, with one token for each key"
        elif getattr(found, "shape", ())[:3] == (batch, seq, heads) and jnp.issubdtype(found.dtype, jnp.floating):
            return found
        else:
            shown = str(jax.tree.map(lambda x: getattr(x, "aval", x), found))
            wanted = f"AttentionInputs, or heads ({batch}, {seq}, {heads}, value_dim)"
        raise ConfigError(f"{self.frame.path}: the cache {type(self).__name__} must return {wanted}, not {shown}")

    def answer_blocks(self, blocks: Sequence[AttentionInputs]) -> tuple[AttentionInputs | Heads, ...]:
        """`answer` for each block of rows of a call (see `CachedBlocks`).

        All views that it returns are of the arrays after the last write. Otherwise the arrays from before a write would
        still be read after it, and XLA would copy them.
        """
        states = [node for _, node in nnx.iter_graph(self) if isinstance(node, DecodingState)]
        written: list[tuple[jax.Array, DecodingState]] = []

        def answered(inputs: AttentionInputs) -> AttentionInputs | Heads:
            found = self.answer(inputs)
            written.extend((state.whole, state) for state in states)
            return found

        found = current().map(answered, blocks)
        newest = {id(array): state for array, state in written}

        def last(x: jax.Array) -> jax.Array:
            return newest[id(x)].whole if id(x) in newest else x

        return tuple(found) if len(found) == 1 else tuple(jax.tree.map(last, each) for each in found)

    def rows(self, inputs: AttentionInputs) -> CachedRows:
        """The cached rows that the tokens of this call continue.

        Raises:
            ContextError: the model was called without a `Decoder`.
        """
        if inputs.cached is None:
            raise ContextError(
                f"{self.frame.describe()} was called without cached rows; call a model with KV caches "
                f"through axcore.infer.Decoder"
            )
        return inputs.cached

    def places(self, inputs: AttentionInputs, size: int) -> tuple[Int[Array, "batch query"], Int[Array, "batch query"]]:
        """The (slot, place) that each token is written to, both int32. The place of a token is its index in the row.

        Padding and tokens with a negative index get the place `size`, which is out of range, so `DecodingState.put`
        drops them.
        """
        rows, index = self.rows(inputs), inputs.query.index
        batch = inputs.q.shape[0]
        slots = jnp.arange(batch, dtype=jnp.int32) if rows.slots is None else rows.slots
        place = jnp.where(index < 0, size, index)  # JAX counts a negative index from the end
        if inputs.query.valid is not None:
            place = jnp.where(inputs.query.valid, place, size)
        place = jnp.broadcast_to(place, inputs.q.shape[:2])
        return jnp.broadcast_to(slots[:, None], place.shape), place


def sized(cache: KVCache.Config | None) -> KVCache.Config | None:
    """The cache, or None if its `batch_size` or `max_len` is REQUIRED. Decoding sets them, so a model in training has
    no such cache."""
    sizes = (getattr(cache, name, None) for name in ("batch_size", "max_len"))
    return None if any(size is REQUIRED for size in sizes) else cache


def without_caches[C: Config](cfg: C) -> C:
    """The model with empty slots in place of the caches that decoding sizes (see `sized`)."""

    def emptied(_: str, node: Config) -> object:
        return REMOVED if isinstance(node, KVCache.Config) and sized(node) is None else node

    new: C = transform(cfg, emptied)
    return new


def for_decoding[C: Config](
    cfg: C, *, batch_size: int, max_len: int, cache: KVCache.Config, max_rollback: int = 0
) -> C:
    """The config of the model with layers that keep decoding state, such as KV caches.

    Each node that has a method `for_decoding(batch_size, max_len, cache) -> Config`, as `Attention.Config` does, is
    replaced by the result. Paths of parameters do not change.

    Args:
        cfg: config of the model.
        batch_size: number of rows of each cache.
        max_len: largest number of tokens in a row.
        cache: fills every empty cache slot.
        max_rollback: number of last tokens of a row that a step may replace, such as drafts. A field of this name, as
            in `Recurrent.Config`, is raised to it.

    Raises:
        ConfigError: `cache` sets another `batch_size` or `max_len`.
    """
    sizes = {"batch_size": batch_size, "max_len": max_len}
    cache = cache.fill(**{name: size for name, size in sizes.items() if has_field(cache, name)})
    if hasattr(cache, "for_decoding"):
        cache = cache.for_decoding(batch_size, max_len, cache)

    def prepare(_: str, node: Config) -> Config:
        node = node.for_decoding(batch_size, max_len, cache) if hasattr(node, "for_decoding") else node
        if not has_field(node, "max_rollback"):
            return node
        return node.set(max_rollback=max(max_rollback, getattr(node, "max_rollback")))  # noqa: B009 - a plugin's field

    prepared: C = transform(cfg, prepare)
    return prepared
