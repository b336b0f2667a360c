"""The base of KV caches, and decoding configs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, Config, ConfigError
from axcore.config.tree import transform
from axcore.module import ContextError, Layer
from axcore.nn.attention.inputs import AttentionInputs
from axcore.nn.tokens import CachedRows


class KVCache(Layer):
    """Base of the layers that fill attention's cache slot. A cache owns its layout.

    Its state is `DecodingState`, which `axcore.infer.Decoder` passes in and out as one donated tree.
    """

    class Config(Layer.Config):
        """Fields of the cache; attention offers `input_dim`, `num_heads`, `num_kv_heads` and `head_dim`."""

        def build(self, *args: Any, **kwargs: Any) -> Any:
            """See `Config.build`."""
            sizes = [name for name in ("batch_size", "max_len") if getattr(self, name, None) is REQUIRED]
            if sizes:
                raise ConfigError(
                    f"{' and '.join(sizes)} of the KV cache: decoding sets them. Leave the slot empty and pass the "
                    f"cache as cache=... to axcore.infer.generate or Decoder.of, or set them"
                )
            return super().build(*args, **kwargs)

    def __call__(self, inputs: AttentionInputs) -> AttentionInputs | jax.Array:
        """Stores the keys and values of some tokens, and answers for all that are stored.

        Args:
            inputs: `kv` holds the new keys and values as a `Contiguous` view; it is None where the attention computes
                none. `mask`, `scale`, `softcap`, `sinks`, `bias` and `dropout` are attention's.

        Returns:
            `inputs` with a view of all stored keys in `kv`, for attention's kernel; or the heads [batch, query, head,
            value_dim] of a cache that reads by itself, which then has to honour every option.
        """
        raise NotImplementedError

    def rows(self, inputs: AttentionInputs) -> CachedRows:
        """The rows that the tokens of this call continue.

        Raises:
            ContextError: the model was not called by a `Decoder`.
        """
        if inputs.cached is None:
            raise ContextError(
                f"{self.frame.describe()} was called without the rows that it caches; call a model with KV caches "
                f"through axcore.infer.Decoder"
            )
        return inputs.cached

    def places(self, inputs: AttentionInputs, size: int) -> tuple[jax.Array, jax.Array]:
        """Where to write: (slot, place), each int32 [batch, query]. The place of what is no token of the row is `size`,
        beyond the end, so that writing it is dropped."""
        rows, index = self.rows(inputs), inputs.query.index
        batch = inputs.q.shape[0]
        slots = jnp.arange(batch, dtype=jnp.int32) if rows.slots is None else rows.slots
        place = jnp.where(index < 0, size, index)  # a negative place would count from the end
        if inputs.query.valid is not None:
            place = jnp.where(inputs.query.valid, place, size)
        place = jnp.broadcast_to(place, inputs.q.shape[:2])
        return jnp.broadcast_to(slots[:, None], place.shape), place


def for_decoding(cfg: Config, *, batch_size: int, max_len: int, cache: KVCache.Config) -> Any:
    """The config of the same model, with every layer keeping what its next call needs.

    A node takes part by a method `for_decoding(batch_size, max_len, cache) -> Config`, as `Attention.Config` does;
    parameters keep their paths.

    Args:
        cache: for every attention whose cache slot is empty.
    """
    if hasattr(cache, "for_decoding"):
        cache = cache.for_decoding(batch_size, max_len, cache)

    def prepare(_: str, node: Config) -> Config:
        return node.for_decoding(batch_size, max_len, cache) if hasattr(node, "for_decoding") else node

    return transform(cfg, prepare)
