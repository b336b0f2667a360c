"""The two sides of cross-layer attention (Brandon et al. 2024, arXiv 2405.12981): layers that share keys and values,
and layers that use them. Both fill the cache slot of attention, since the cache determines which keys the kernel sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import axcore as ax
from axcore.nn import Attention, AttentionInputs, KVCache, KVView, sized
from axcore.nn.attention.inputs import Heads


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

    @ax.method
    def answer_blocks(self, blocks: Sequence[AttentionInputs]) -> tuple[AttentionInputs | Heads, ...]:
        """See `KVCache`. Shares the views of all blocks.

        Raises:
            ConfigError: the attention has no keys, or the inner cache returns heads instead of a view.
        """
        answers = tuple(blocks) if self.cache is None else self.cache.answer_blocks(blocks)
        views = []
        for each in answers:
            if not isinstance(each, AttentionInputs):
                raise ax.ConfigError(
                    f"{self.frame.path}: {type(self.cache).__name__} computes attention itself. Sharing keys with "
                    f"other layers requires a cache that returns a view of them."
                )
            if each.kv is None:
                raise ax.ConfigError(f"{self.frame.path}: the attention has no key and value to share")
            views.append(each.kv)
        self.share(_shared_name(self.config.name), tuple(views))
        return answers


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

    @ax.method
    def answer_blocks(self, blocks: Sequence[AttentionInputs]) -> tuple[AttentionInputs | Heads, ...]:
        """See `KVCache`.

        Raises:
            ContextError: no earlier layer shared keys and values under this name.
            ConfigError: the attention computes its own keys, or expects another number or width of heads.
        """
        if any(inputs.kv is not None for inputs in blocks):
            raise ax.ConfigError(
                f"{self.frame.path}: the attention computes keys and values that would not be used. Set its key and "
                f"value to None, or remove BorrowKV from its cache slot."
            )
        views: tuple[KVView, ...] = self.shared(_shared_name(self.config.name))
        found, wanted = views[0].shape[2:], (self.config.num_kv_heads, self.config.head_dim)
        if found != wanted:
            raise ax.ConfigError(
                f"{self.frame.path}: the shared keys have (num_kv_heads, head_dim) = {found}, but this attention has "
                f"{wanted}. Layers that share keys must have equal values."
            )
        return tuple(inputs.replace(kv=view) for inputs, view in zip(blocks, views, strict=True))


def _shared_name(name: str) -> str:
    return f"cross-layer-kv {name}"


def sharing(attention: Attention.Config, name: str) -> Attention.Config:
    """An attention that shares its keys and values under `name`."""
    return attention.set(cache=ShareKV.Config(name=name, cache=attention.cache))


def borrowing(attention: Attention.Config, name: str) -> Attention.Config:
    """An attention that uses the keys and values shared under `name` instead of its own."""
    return attention.set(key=None, value=None, cache=BorrowKV.Config(name=name))
