"""The two sides of cross-layer attention (Brandon et al. 2024, arXiv 2405.12981): layers that share keys and values,
and layers that use them. Both fill the cache slot of attention, since the cache determines which keys the kernel sees.
"""

from __future__ import annotations

import axcore as ax
from axcore.nn import Attention, AttentionInputs, KVCache, KVView, sized


class ShareKV(KVCache):
    """Leaves attention unchanged and shares its keys and values with later layers.

    While decoding, it shares the view that the inner cache returns, so that one cache serves the whole group.
    """

    class Config(KVCache.Config):
        layout_fields = ("cache",)
        input_dim: ax.PositiveInt = ax.REQUIRED
        num_heads: ax.PositiveInt = ax.REQUIRED
        num_kv_heads: ax.PositiveInt = ax.REQUIRED
        head_dim: ax.PositiveInt = ax.REQUIRED
        name: str
        """The name under which keys and values are shared. Borrowing layers use the same name."""
        cache: KVCache.Config | None = None
        """The original cache of the attention."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> ShareKV.Config:
            return self if self.cache is not None else self.set(cache=cache)

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        widths = {name: getattr(cfg, name) for name in ("input_dim", "num_heads", "num_kv_heads", "head_dim")}
        self.cache = self.child("cache", sized(cfg.cache), rngs, **widths)

    def __call__(self, inputs: AttentionInputs) -> AttentionInputs:
        """See `KVCache`.

        Raises:
            ConfigError: the attention has no keys, or the inner cache returns heads instead of a view.
        """
        asked = inputs if self.cache is None else self.cache(inputs)
        if not isinstance(asked, AttentionInputs):
            raise ax.ConfigError(
                f"{self.frame.path}: {type(self.cache).__name__} computes attention itself. Sharing keys with "
                f"other layers requires a cache that returns a view of them."
            )
        if asked.kv is None:
            raise ax.ConfigError(f"{self.frame.path}: the attention has no key and value to share")
        self.share(_shared_name(self.config.name), asked.kv)
        return asked


class BorrowKV(KVCache):
    """Attends with the keys and values that an earlier layer shared. Has no decoding state of its own."""

    class Config(KVCache.Config):
        layout_fields = ()
        keeps_slot = True
        num_kv_heads: ax.PositiveInt = ax.REQUIRED
        head_dim: ax.PositiveInt = ax.REQUIRED
        name: str
        """The name under which the keys and values are shared."""

    config: Config
    uses_dtypes = False

    def __call__(self, inputs: AttentionInputs) -> AttentionInputs:
        """See `KVCache`.

        Raises:
            ContextError: no earlier layer shared keys and values under this name.
            ConfigError: the attention computes its own keys, or expects another number or width of heads.
        """
        if inputs.kv is not None:
            raise ax.ConfigError(
                f"{self.frame.path}: the attention computes keys and values that would not be used. Set its key and "
                f"value to None, or remove BorrowKV from its cache slot."
            )
        view: KVView = self.shared(_shared_name(self.config.name))
        wanted = (self.config.num_kv_heads, self.config.head_dim)
        if view.shape[2:] != wanted:
            raise ax.ConfigError(
                f"{self.frame.path}: the shared keys have (num_kv_heads, head_dim) = {view.shape[2:]}, but this "
                f"attention has {wanted}. Layers that share keys must have equal values."
            )
        return inputs.replace(kv=view)


def _shared_name(name: str) -> str:
    return f"cross-layer-kv {name}"


def sharing(attention: Attention.Config, name: str) -> Attention.Config:
    """An attention that shares its keys and values under `name`."""
    return attention.set(cache=ShareKV.Config(name=name, cache=attention.cache))


def borrowing(attention: Attention.Config, name: str) -> Attention.Config:
    """An attention that uses the keys and values shared under `name` instead of its own."""
    return attention.set(key=None, value=None, cache=BorrowKV.Config(name=name))
