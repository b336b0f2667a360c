"""The feature `mamba2`: replaces attention with Mamba-2."""

from __future__ import annotations

import axcore as ax
from axcore.config import has_field
from axcore.nn import BaseAttention, edit_layers
from axcore_mamba2.mixer import Mamba2


def use_mamba2(
    cfg: ax.Config,
    state_dim: int = 128,
    head_dim: int = 64,
    expand: int = 2,
    num_groups: int = 1,
    conv_width: int = 4,
    chunk: int = 256,
    where: ax.Where = BaseAttention,
    attention_every: int | None = None,
) -> ax.Config:
    """Replaces every selected attention, or most of them, with Mamba-2.

    Args:
        state_dim, head_dim, expand, num_groups, conv_width, chunk: see `Mamba2.Config`.
        where: which attentions.
        attention_every: the last of every `attention_every` layers keeps its attention, as in the hybrids of Dao and Gu
            2024, section 9.2.3. A `Repeat` then repeats groups of that many layers. None keeps no attention.

    Raises:
        ConfigError: nothing is selected.
    """
    mixer = Mamba2.Config(
        state_dim=state_dim,
        head_dim=head_dim,
        expand=expand,
        num_groups=num_groups,
        conv_width=conv_width,
        chunk=chunk,
    )

    def in_place_of(path: str, old: ax.Config) -> ax.Config:
        del path
        kept = [name for name in ("input_dim", "dtypes", "tags") if has_field(old, name)]
        return mixer.set(**{name: getattr(old, name) for name in kept})

    if attention_every is None:
        return ax.select(cfg, where).map(in_place_of)
    if attention_every < 2:
        raise ax.ConfigError(f"attention_every must be at least 2, not {attention_every}. None keeps no attention.")

    def most(path: str, old: ax.Config, number: int) -> ax.Config:
        return old if number % attention_every == attention_every - 1 else in_place_of(path, old)

    return edit_layers(cfg, where, most)
