"""Features of the core: edits of a model that many want, by name for `axcore.use`."""

from __future__ import annotations

from typing import Any

from axcore.config import Config, ConfigError, Where, has_field, select
from axcore.nn.attention.base import BaseAttention
from axcore.nn.attention.grouped_query import Attention
from axcore.nn.attention.masks import SlidingWindow
from axcore.nn.norm import AcrossHeads, RMSNorm
from axcore.nn.stacks import edit_layers


def use_sliding_window(cfg: Config, size: int, global_every: int | None = None, where: Where = BaseAttention) -> Config:
    """Lets every selected attention see the nearest `size` tokens only, or most of them.

    Args:
        size: keys that a query sees, itself included.
        global_every: of each so many layers the last sees all, as in Gemma 3 (6); a `Repeat` then repeats groups of so
            many layers. None: no layer does.
        where: which attentions.
    """
    if global_every is not None and global_every < 2:
        raise ConfigError(f"global_every must be at least 2, not {global_every}; None leaves no layer global")

    def edit(_: str, attention: Any, number: int) -> Any:
        if global_every is not None and number % global_every == global_every - 1:
            return attention
        return attention.set(mask=attention.mask & SlidingWindow(size=size))

    return edit_layers(cfg, where, edit)


def use_qk_norm(cfg: Config, eps: float = 1e-6, across_heads: bool = False, where: Where = Attention) -> Config:
    """Normalizes the queries and keys of every selected attention (Dehghani et al. 2023, arXiv 2302.05442).

    Args:
        eps: of the RMSNorms.
        across_heads: all heads of a token as one vector (OLMo 2), or each head alone.
        where: which attentions.
    """
    norm = RMSNorm.Config(eps=eps)
    made = AcrossHeads.Config(norm=norm) if across_heads else norm
    return select(cfg, where).set(query_norm=made, key_norm=made)


def use_fused_qkv(cfg: Config, where: Where = Attention) -> Config:
    """Makes queries, keys and values of every selected attention in one product.

    Raises:
        ConfigError: an attention whose three projections are not alike.
    """

    def fused(_: str, attention: Any) -> Any:
        if attention.qkv is not None:
            raise ConfigError("its queries, keys and values are made in one product already")
        if attention.query is None or not attention.query == attention.key == attention.value:
            raise ConfigError("query, key and value must be given, and alike, to become one product")
        return attention.set(qkv=attention.query, query=None, key=None, value=None)

    return select(cfg, where).map(fused)


def use_dropout(cfg: Config, rate: float, where: Where | None = None) -> Config:
    """Sets the dropout rate of every selected node.

    Args:
        rate: chance to be zeroed while training, from 0 to below 1.
        where: which nodes; None: all that have one (embeddings, attention weights, residuals, hidden features).
    """
    return select(cfg, where if where is not None else lambda _, node: has_field(node, "dropout")).set(dropout=rate)
