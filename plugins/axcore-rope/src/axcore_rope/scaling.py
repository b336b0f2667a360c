"""Scalings of RoPE for rows longer than those in training. Each is a config value."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import axcore as ax

Rates = Any
"""NumPy or jax array [rotary_dim / 2]: radians by which each pair of features rotates per position."""


class Scaling(ax.Config):
    """Base class of scalings. Subclasses override `rates`."""

    by_length: ClassVar[bool] = False
    """Whether the rates depend on the length of a row, which is 1 plus its largest position in the call.

    Under jit, the length is traced. While decoding, it is the current length. Cached keys keep the rates of the call
    that computed them, as in `transformers`, so decoding past `original_max` differs from computing the whole row at
    once. See also `recompute_above`.
    """

    def rates(self, theta: float, rotary_dim: int, length: jax.Array | None) -> Rates:
        """Computes the rates.

        Args:
            theta: the base.
            rotary_dim: features that are rotated.
            length: int scalar; None unless `by_length`.

        Raises:
            ConfigError: the scaling does not support these arguments.
        """
        raise NotImplementedError

    @property
    def attention_scaling(self) -> float:
        """Multiplies rotated queries and keys."""
        return 1.0

    @property
    def recompute_above(self) -> int | None:
        """If given, the keys of longer rows differ from those of shorter rows, so a row that grows beyond this length
        must be computed again. `axcore.infer.Generator` does this; see also `axcore.infer.Decoder`."""
        return None


def plain(theta: float, rotary_dim: int) -> np.ndarray:
    """`theta ** (-2 i / rotary_dim)` (Su et al. 2021, arXiv 2104.09864, eq. 15), in float64."""
    return theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)


def is_positive(value: object) -> bool:
    """Whether `value` is a positive, finite number, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


class Linear(Scaling):
    """Positions divided by `factor` (Chen et al. 2023, arXiv 2306.15595, eq. 4)."""

    factor: ax.PositiveFloat

    def rates(self, theta: float, rotary_dim: int, length: jax.Array | None) -> Rates:
        return plain(theta, rotary_dim) / self.factor


class DynamicNTK(Scaling):
    """A base that grows with rows longer than `original_max` (see YaRN's paper, arXiv 2309.00071, section 3.3)."""

    by_length: ClassVar[bool] = True
    factor: ax.PositiveFloat
    original_max: ax.PositiveInt
    """Length of the rows that the model was trained on."""

    def rates(self, theta: float, rotary_dim: int, length: jax.Array | None) -> Rates:
        assert length is not None
        if rotary_dim < 4:
            raise ax.ConfigError(f"DynamicNTK requires at least 4 rotated features, not {rotary_dim}")
        longest = jnp.maximum(length, self.original_max).astype(jnp.float32)
        grown = self.factor * longest / self.original_max - (self.factor - 1)
        base = theta * grown ** (rotary_dim / (rotary_dim - 2))
        return base ** (-jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim)


class YaRN(Scaling):
    """Slow pairs rotate `factor` times more slowly, fast pairs are unchanged, and logits are sharpened (Peng et al.
    2023, arXiv 2309.00071, section 3)."""

    factor: ax.PositiveFloat
    original_max: ax.PositiveInt
    """Length of the rows that the model was trained on."""
    beta_fast: ax.PositiveFloat = 32.0
    """Pairs that rotate at least this many times within `original_max` are unchanged."""
    beta_slow: ax.PositiveFloat = 1.0
    """Pairs that rotate at most this many times are slowed by the whole factor; pairs in between by a part of it."""
    truncate: bool = True
    """Whether the bounds of the range in between are rounded outwards to whole pairs."""
    mscale: ax.NonNegativeFloat | None = None
    mscale_all_dim: ax.NonNegativeFloat | None = None
    attention_factor: ax.PositiveFloat | None = None
    """Factor that multiplies rotated queries and keys. None uses the paper's eq. 22, or if `mscale` and
    `mscale_all_dim` are set, the quotient of `yarn_mscale` for the two."""

    def rates(self, theta: float, rotary_dim: int, length: jax.Array | None) -> Rates:
        if theta <= 1:
            raise ax.ConfigError(f"YaRN requires theta above 1, not {theta}")

        def pair_that_turns(times: float) -> float:
            return rotary_dim * math.log(self.original_max / (times * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001
        slowed = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0, 1)
        rates = plain(theta, rotary_dim)
        return rates / self.factor * slowed + rates * (1 - slowed)

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """`0.1 mscale ln(factor) + 1` (YaRN, eq. 22). DeepSeek's models multiply the scale of logits by its square."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class Llama3(Scaling):
    """Pairs of long wavelength rotate `factor` times more slowly, pairs of short wavelength are unchanged, and rates in
    between are interpolated (Llama 3.1)."""

    factor: ax.PositiveFloat
    original_max: ax.PositiveInt
    """Length of the rows that the model was trained on."""
    low_freq_factor: ax.PositiveFloat = 1.0
    high_freq_factor: ax.PositiveFloat = 4.0

    def __post_init__(self) -> None:
        if ax.REQUIRED not in (self.low_freq_factor, self.high_freq_factor) and (
            self.high_freq_factor <= self.low_freq_factor
        ):
            raise ax.ConfigError(
                f"Llama3.high_freq_factor={self.high_freq_factor} must exceed low_freq_factor={self.low_freq_factor}"
            )

    def rates(self, theta: float, rotary_dim: int, length: jax.Array | None) -> Rates:
        rates = plain(theta, rotary_dim)
        turns = self.original_max * rates / (2 * math.pi)  # within a training row
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0, 1)
        return (1 - smooth) * rates / self.factor + smooth * rates


class LongRoPE(Scaling):
    """A separate factor per pair, from two lists: one for rows up to `original_max`, one for longer rows (Ding et al.
    2024, arXiv 2402.13753)."""

    by_length: ClassVar[bool] = True
    short: tuple[ax.PositiveFloat, ...]
    """Divisors of the rates, one for each pair."""
    long: tuple[ax.PositiveFloat, ...]
    original_max: Annotated[int, ax.Range(at_least=2)]
    """Length of the rows that the model was trained on."""
    factor: ax.PositiveFloat = 1.0
    """Ratio of the longest row to `original_max`. Used only for the default of `attention_factor`."""
    attention_factor: ax.PositiveFloat | None = None
    """Factor that multiplies rotated queries and keys. None uses `sqrt(1 + ln(factor) / ln(original_max))`."""

    def rates(self, theta: float, rotary_dim: int, length: jax.Array | None) -> Rates:
        assert length is not None
        for name in ("short", "long"):
            if len(getattr(self, name)) != rotary_dim // 2:
                raise ax.ConfigError(
                    f"LongRoPE.{name} has {len(getattr(self, name))} factors, but {rotary_dim} rotated features "
                    f"require {rotary_dim // 2}"
                )
        rates = plain(theta, rotary_dim)
        short, long = (jnp.asarray(rates / np.asarray(each), jnp.float32) for each in (self.short, self.long))
        return jnp.where(length > self.original_max, long, short)

    @property
    def recompute_above(self) -> int | None:
        """The length up to which keys have the short factors, as in `transformers`' Phi-3."""
        return self.original_max

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(self.original_max))
