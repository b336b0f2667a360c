"""Built-in features: common edits of a model config, which `axcore.use` finds by name."""

from __future__ import annotations

from typing import cast

from axcore.config import Config, ConfigError, Where, has_field, select
from axcore.nn.attention.base import BaseAttention
from axcore.nn.attention.grouped_query import Attention
from axcore.nn.attention.masks import SlidingWindow
from axcore.nn.layer_stack import Stack
from axcore.nn.norm import FullWidthNorm, RMSNorm
from axcore.nn.stacks import edit_layers, use_remat
from axcore.parallel import ByTag


def use_sliding_window(cfg: Config, size: int, global_every: int | None = None, where: Where = BaseAttention) -> Config:
    """Limits every selected attention layer to a sliding window, except every `global_every`-th.

    Args:
        size: number of keys that a query sees, itself included.
        global_every: every `global_every`-th layer keeps its mask (6 in Gemma 3). A `Repeat` then repeats groups of
            `global_every` layers. None: every selected layer gets the window.
        where: selects attention layers.
    """
    if global_every is not None and global_every < 2:
        raise ConfigError(
            f"global_every must be at least 2, not {global_every}; set it to None to give every layer the window"
        )

    def edit(_: str, attention: BaseAttention.Config, number: int) -> BaseAttention.Config:
        if global_every is not None and number % global_every == global_every - 1:
            return attention
        return attention.set(mask=attention.mask & SlidingWindow(size=size))

    return edit_layers(cfg, where, edit)


def use_qk_norm(cfg: Config, eps: float = 1e-6, full_width: bool = False, where: Where = Attention) -> Config:
    """Normalizes the queries and keys of every selected attention layer (Dehghani et al. 2023, arXiv 2302.05442).

    Args:
        eps: added to the mean square in each RMSNorm.
        full_width: whether all heads of a token are normalized as one vector (OLMo 2) instead of separately.
        where: selects attention layers.
    """
    norm = RMSNorm.Config(eps=eps)
    made = FullWidthNorm.Config(norm=norm) if full_width else norm
    return select(cfg, where).put(query_norm=made, key_norm=made)


def use_fused_qkv(cfg: Config, where: Where = Attention) -> Config:
    """Fuses the query, key and value projections of every selected attention layer into one, `qkv`.

    Raises:
        ConfigError: the three projections of a layer are not equal, or already fused.
    """

    def fused(_: str, node: Config) -> Config:
        attention = cast(Attention.Config, node)
        if attention.qkv is not None:
            raise ConfigError("qkv is already set: queries, keys and values are computed in one product")
        if (fusion := attention.fusion()) is None:
            raise ConfigError("query, key and value must be set and equal to be fused into qkv")
        return fusion.config

    return select(cfg, where).map(fused)


def use_remat_by_tag(
    cfg: Config,
    save: tuple[str, ...] = (),
    offload: tuple[str, ...] = (),
    recompute: tuple[str, ...] = (),
    where: Where = Stack,
) -> Config:
    """Recomputes the values inside each layer in the backward pass, except those that are saved or offloaded to the
    host. See `axcore.parallel.ByTag` for the tags.

    Args:
        where: selects stacks of layers.
    """
    return use_remat(cfg, ByTag(save=save, offload=offload, recompute=recompute), where)


def use_dropout(cfg: Config, rate: float, where: Where | None = None) -> Config:
    """Sets the dropout rate of every selected node.

    Args:
        rate: probability of zeroing an element while training, at least 0 and below 1.
        where: selects nodes; None: every node with a dropout rate (embeddings, attention weights, residuals, hidden
            features).
    """
    return select(cfg, where if where is not None else lambda _, node: has_field(node, "dropout")).set(dropout=rate)
