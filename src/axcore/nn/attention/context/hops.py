"""The kernel calls of ring attention: which queries attend to which keys after each hop."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from axcore.nn.attention.inputs import AttentionInputs
from axcore.nn.attention.masks import And, Causal, Full, Mask, SlidingWindow
from axcore.nn.attention.request import KernelRequest


class TokenRange(NamedTuple):
    """A range of the tokens of one device: all of them, or the first or second half."""

    start: int
    size: int

    def of(self, arrays: PyTree) -> PyTree:
        """Slices arrays [batch, seq, ...]."""
        return jax.tree.map(lambda x: x[:, self.start : self.start + self.size], arrays)

    def put(self, arrays: PyTree, values: PyTree) -> PyTree:
        """Replaces the values of these tokens."""
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, self.start, axis=1), arrays, values)


class PartialCall(NamedTuple):
    """One kernel call.

    Attributes:
        aligned: whether queries and keys are the same tokens.
    """

    queries: TokenRange
    keys: TokenRange
    mask: Mask
    aligned: bool

    def request(self, part: KernelRequest) -> KernelRequest:
        """The request of this call, with the options of `part`."""
        return dataclasses.replace(
            part, query_len=self.queries.size, key_len=self.keys.size, mask=self.mask, aligned=self.aligned
        )

    def inputs(self, part: AttentionInputs) -> AttentionInputs:
        """The inputs of the kernel for this call."""
        kv = self.keys.of(part.plain)
        query = kv.tokens if self.aligned else self.queries.of(part.query)
        q = self.queries.of(part.q)
        return part.replace(q=q, query=query, kv=kv, mask=self.mask, sinks=None, return_lse=True)


class Hop(NamedTuple):
    """The calls of one hop, after which a device holds the keys of another device.

    Attributes:
        earlier: the calls if those keys come earlier in the row than the queries.
        later: the calls if they come later.
    """

    earlier: tuple[PartialCall, ...]
    later: tuple[PartialCall, ...]


def hops_of(part: KernelRequest, shards: int, balanced: bool) -> tuple[Hop, ...]:
    """The calls of each hop. In the first one, the device still holds its own keys.

    Args:
        part: the call on one device, whose lengths are those of its part of the sequence.
        shards: the number of devices.
        balanced: `RingAttention.Config.balanced`.
    """
    queries, keys = TokenRange(0, part.query_len), TokenRange(0, part.key_len)
    own = (PartialCall(queries, keys, part.mask, part.aligned),)
    if not _is_causal(part):
        other = (PartialCall(queries, keys, part.mask, aligned=False),)
        return Hop(own, own), *[Hop(other, other)] * (shards - 1)
    others = tuple(term for term in _terms(part.mask) if type(term) is not Causal)
    earlier = And(masks=others) if len(others) > 1 else others[0] if others else Full()
    if not balances(part, shards, balanced):
        hop = Hop((PartialCall(queries, keys, earlier, aligned=False),), ())
        return Hop(own, own), *[hop] * (_reach(part, shards) - 1)
    # In the zig-zag order, device i holds an early half, i, and a late half, 2n - 1 - i, of the halves 0 to 2n - 1. The
    # early half of an earlier device precedes both halves of this device, and its late half follows both. Both halves
    # of a later device lie between the early and the late half of this device.
    half = part.query_len // 2
    early, late = TokenRange(0, half), TokenRange(half, half)
    first = (
        PartialCall(early, early, part.mask, aligned=True),
        PartialCall(late, early, earlier, aligned=False),
        PartialCall(late, late, part.mask, aligned=True),
    )
    halves = PartialCall(queries, early, earlier, aligned=False), PartialCall(late, keys, earlier, aligned=False)
    hop = Hop(halves[:1], halves[1:])
    return Hop(first, first), *[hop] * (shards - 1)


def balances(part: KernelRequest, shards: int, balanced: bool) -> bool:
    """Whether the devices exchange halves, so that all have equal work. The arguments are those of `hops_of`."""
    return balanced and _is_causal(part) and _reach(part, shards) == shards


def _is_causal(part: KernelRequest) -> bool:
    """Whether only earlier tokens of the row are visible. This is known only if queries and keys are the same
    tokens."""
    return part.aligned and any(type(term) is Causal for term in _terms(part.mask))


def _reach(part: KernelRequest, shards: int) -> int:
    """The number of devices whose keys a causal call can see: the device itself and earlier ones within the window."""
    windows = [term.size for term in _terms(part.mask) if isinstance(term, SlidingWindow)]
    return min([shards, *(1 - (1 - size) // part.key_len for size in windows)])


def _terms(mask: Mask) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, And) else (mask,)
