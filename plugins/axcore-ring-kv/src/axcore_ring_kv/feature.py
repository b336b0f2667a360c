"""Ring caches in the layers whose masks have a window."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, cast

import axcore as ax
from axcore.nn import BaseAttention
from axcore_ring_kv.cache import RingCache
from axcore_ring_kv.reach import reach


def use_ring_kv(
    cfg: ax.Config,
    spare: int = 7,
    dtype: Literal["int8", "float8_e4m3fn"] | None = None,
    where: ax.Where = BaseAttention,
) -> ax.Config:
    """Gives every selected attention with a sliding window a ring cache of that window. Decoding gives the others the
    cache that it is called with.

    Args:
        spare: places of a ring beyond its window, see `RingCache`.
        dtype: dtype of stored codes; None: keys and values are stored in the compute dtype.
        where: selects attention layers.

    Raises:
        ConfigError: no selected attention has a window.
    """
    selected = {path: cast(BaseAttention.Config, node) for path, node in ax.select(cfg, where)}
    windows = {path: window for path, node in selected.items() if (window := reach(node.mask)) is not None}
    if not windows:
        raise ax.ConfigError(
            "no selected attention has a sliding window, which a ring cache requires. Use sliding-window first, or "
            "another cache"
        )
    for window in sorted(set(windows.values())):
        ring = RingCache.Config(window=window, spare=spare, dtype=dtype)
        cfg = _filled(cfg, {path for path, each in windows.items() if each == window}, ring)
    return cfg


def _filled(cfg: ax.Config, paths: Collection[str], ring: RingCache.Config) -> ax.Config:
    return ax.select(cfg, lambda path, _: path in paths).put(cache=ring)
