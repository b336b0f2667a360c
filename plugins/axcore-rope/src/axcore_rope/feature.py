"""The feature `rope`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import axcore as ax
from axcore.nn import BaseAttention, edit_layers
from axcore_rope.published import scaling_of
from axcore_rope.rotary import Layout, Rotary
from axcore_rope.scaling import Scaling


def use_rope(
    cfg: ax.Config,
    theta: float = 10_000.0,
    layout: Layout = "half",
    rotary_dim: int | None = None,
    scaling: Scaling | Mapping[str, Any] | None = None,
    sections: tuple[int, ...] | None = None,
    interleave_sections: bool = False,
    skip_every: int | None = None,
    where: ax.Where = BaseAttention,
) -> ax.Config:
    """Fills the position slot of every selected attention with RoPE.

    Args:
        theta: the base of the rotation rates. With a larger base, pairs rotate more slowly.
        layout, rotary_dim, sections, interleave_sections: see `Rotary.Config`.
        scaling: the scaling of the rates for long rows: a `Scaling`, or a dictionary as in published configs, such as
            `{"rope_type": "yarn", ...}`.
        skip_every: the last of every `skip_every` layers gets no RoPE (NoPE: Yang et al. 2025, arXiv 2501.18795;
            SmolLM 3 and Llama 4 use 4). None skips no layer.
        where: which attentions.
    """
    if skip_every is not None and skip_every < 2:
        raise ax.ConfigError(f"skip_every must be at least 2, not {skip_every}. None skips no layer.")
    rotary = Rotary.Config(
        theta=theta,
        layout=layout,
        rotary_dim=rotary_dim,
        scaling=scaling if scaling is None or isinstance(scaling, Scaling) else scaling_of(scaling),
        sections=sections,
        interleave_sections=interleave_sections,
    )
    if skip_every is None:
        return ax.select(cfg, where).put(position=rotary)

    def most(_: str, attention: Any, number: int) -> Any:
        return attention.put(position=None if number % skip_every == skip_every - 1 else rotary)

    return edit_layers(cfg, where, most)
