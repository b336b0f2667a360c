"""The kernel calls of ring attention: which queries attend to which keys after each hop."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from axcore.nn.attention.inputs import AttentionInputs
from axcore.nn.attention.masks import And, Causal, Full, Mask, SlidingWindow
from axcore.nn.attention.request import KernelRequest


class Share(NamedTuple):
    """Consecutive tokens of the part of one device: all of them, or the first or second half."""

    start: int
    size: int

    def of(self, arrays: PyTree) -> PyTree:
        """These tokens of arrays [batch, seq, ...]."""
        return jax.tree.map(lambda x: x[:, self.start : self.start + self.size], arrays)

    def put(self, arrays: PyTree, values: PyTree) -> PyTree:
        """The arrays with other values for these tokens."""
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, self.start, axis=1), arrays, values)


class PartialCall(NamedTuple):
    """One kernel call. `aligned`: queries and keys are the same tokens."""

    queries: Share
    keys: Share
    mask: Mask
    aligned: bool

    def request(self, part: KernelRequest) -> KernelRequest:
        """The request, except its options."""
        return dataclasses.replace(
            part, query_len=self.queries.size, key_len=self.keys.size, mask=self.mask, aligned=self.aligned
        )

    def inputs(self, part: AttentionInputs) -> AttentionInputs:
        """The inputs of the kernel."""
        kv = self.keys.of(part.plain)
        query = kv.tokens if self.aligned else self.queries.of(part.query)
        q = self.queries.of(part.q)
        return part.replace(q=q, query=query, kv=kv, mask=self.mask, sinks=None, return_lse=True)


class Hop(NamedTuple):
    """The calls with the keys of one other device, which comes earlier or later in the row than this device."""

    earlier: tuple[PartialCall, ...]
    later: tuple[PartialCall, ...]


def hops_of(part: KernelRequest, shards: int, balanced: bool) -> tuple[Hop, ...]:
    """The calls of each hop. The first one is that with the keys of the device itself.

    Args:
        part: the call with the part of one device.
        shards: the number of devices.
        balanced: `RingAttention.Config.balanced`.
    """
    queries, keys = Share(0, part.query_len), Share(0, part.key_len)
    own = (PartialCall(queries, keys, part.mask, part.aligned),)
    if not _is_causal(part):
        apart = (PartialCall(queries, keys, part.mask, aligned=False),)
        return Hop(own, own), *[Hop(apart, apart)] * (shards - 1)
    rest = tuple(arm for arm in _arms(part.mask) if type(arm) is not Causal)
    earlier = And(masks=rest) if len(rest) > 1 else rest[0] if rest else Full()
    if not balances(part, shards, balanced):
        hop = Hop((PartialCall(queries, keys, earlier, aligned=False),), ())
        return Hop(own, own), *[hop] * (_reach(part, shards) - 1)
    # The device holds an early and a late half. In the zig-zag order of halves 0, 1, ..., 2n - 1, device i holds i and
    # 2n - 1 - i. The early half of an earlier device precedes both halves of this one, and its late half neither. Both
    # halves of a later device lie between the early and the late half of this one.
    half = part.query_len // 2
    early, late = Share(0, half), Share(half, half)
    first = (
        PartialCall(early, early, part.mask, aligned=True),
        PartialCall(late, early, earlier, aligned=False),
        PartialCall(late, late, part.mask, aligned=True),
    )
    halves = PartialCall(queries, early, earlier, aligned=False), PartialCall(late, keys, earlier, aligned=False)
    hop = Hop(halves[:1], halves[1:])
    return Hop(first, first), *[hop] * (shards - 1)


def balances(part: KernelRequest, shards: int, balanced: bool) -> bool:
    """Whether the devices exchange halves, so that each has equal work. The arguments are those of `hops_of`."""
    return balanced and _is_causal(part) and _reach(part, shards) == shards


def _is_causal(part: KernelRequest) -> bool:
    """Whether only earlier tokens of the row are visible. Positions are compared with those of other devices, so
    queries and keys must be the same tokens."""
    return part.aligned and any(type(arm) is Causal for arm in _arms(part.mask))


def _reach(part: KernelRequest, shards: int) -> int:
    """The number of devices, this one and earlier ones, whose keys are in the window of a query of a causal call."""
    windows = [arm.size for arm in _arms(part.mask) if isinstance(arm, SlidingWindow)]
    return min([shards, *(1 - (1 - size) // part.key_len for size in windows)])


def _arms(mask: Mask) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, And) else (mask,)
