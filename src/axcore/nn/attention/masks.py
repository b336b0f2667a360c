"""Attention masks: configs whose structure a kernel can read instead of a dense mask array."""

from __future__ import annotations

import functools
import operator

import jax.numpy as jnp
from jaxtyping import Array, Bool

from axcore.config import Config, ConfigError, PositiveInt
from axcore.nn.tokens import TokenInfo

Allowed = Bool[Array, "#batch #query #key"]


class Mask(Config):
    """Base of masks. Combine them with `&` and `|`."""

    def allowed(self, query: TokenInfo, key: TokenInfo) -> Allowed:
        """True where the query may see the key."""
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return And(masks=(*_members(self, And), *_members(other, And)))

    def __or__(self, other: Mask) -> Mask:
        return Or(masks=(*_members(self, Or), *_members(other, Or)))


class Full(Mask):
    """Full attention: every query sees every key."""

    def allowed(self, query: TokenInfo, key: TokenInfo) -> Allowed:
        return jnp.ones((1, query.index.shape[-1], key.index.shape[-1]), bool)


class Causal(Mask):
    """A query sees itself and earlier keys of its row."""

    def allowed(self, query: TokenInfo, key: TokenInfo) -> Allowed:
        return query.index[:, :, None] >= key.index[:, None, :]


class SlidingWindow(Mask):
    """A query sees keys at most `size - 1` places away: itself and the nearest `size - 1` on either side."""

    size: PositiveInt

    def allowed(self, query: TokenInfo, key: TokenInfo) -> Allowed:
        return jnp.abs(query.index[:, :, None] - key.index[:, None, :]) < self.size


class Prefix(Mask):
    """Every query sees the first `size` tokens of each document, as in a prefix language model (Raffel et al. 2020,
    arXiv 1910.10683, section 3.2.1). Use it as `(Causal() | Prefix(size=n)) & SameSegment()`."""

    size: PositiveInt

    def allowed(self, query: TokenInfo, key: TokenInfo) -> Allowed:
        if key.positions.ndim != 2:
            raise ConfigError("Prefix requires one position for each token, but positions have several coordinates")
        return key.positions[:, None, :] < self.size


class SameSegment(Mask):
    """A query sees keys of its own document; without segment ids it sees all keys."""

    def allowed(self, query: TokenInfo, key: TokenInfo) -> Allowed:
        if query.segment_ids is None or key.segment_ids is None:
            return jnp.ones((1, 1, 1), bool)
        return query.segment_ids[:, :, None] == key.segment_ids[:, None, :]


class And(Mask):
    """A query sees the keys that every mask in `masks` allows."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        _check_not_empty(self)

    def allowed(self, query: TokenInfo, key: TokenInfo) -> Allowed:
        return functools.reduce(operator.and_, (mask.allowed(query, key) for mask in self.masks))

    def __repr__(self) -> str:
        return " & ".join(f"({mask!r})" if isinstance(mask, Or) else repr(mask) for mask in self.masks)


class Or(Mask):
    """A query sees the keys that at least one mask in `masks` allows."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        _check_not_empty(self)

    def allowed(self, query: TokenInfo, key: TokenInfo) -> Allowed:
        return functools.reduce(operator.or_, (mask.allowed(query, key) for mask in self.masks))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.masks))


def visible(mask: Mask, query: TokenInfo, key: TokenInfo) -> Allowed:
    """True for the valid keys that the mask allows."""
    allowed = mask.allowed(query, key)
    return allowed if key.valid is None else allowed & key.valid[:, None, :]


def _check_not_empty(mask: And | Or) -> None:
    if mask.masks == ():
        raise ConfigError(f"{type(mask).__name__}.masks must contain at least one mask. Use Full() to see every key")


def _members(mask: Mask, kind: type[And] | type[Or]) -> tuple[Mask, ...]:
    """Flattens `(a & b) & c`, so the text form does not depend on the order of composition."""
    return mask.masks if isinstance(mask, kind) else (mask,)
