"""Sizes of the blocks of queries and keys that the kernels load into on-chip memory."""

from __future__ import annotations

import dataclasses
import math

LANES = 128
"""Blocks are multiples of the number of lanes of a TPU's vector unit."""
LARGEST_DEFAULT = 512
MAX_PADDING = 1 / 8
"""The largest share of padding that a default block may add to a sequence."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """The blocks of one kernel.

    Attributes:
        q, kv: number of queries and keys in a block.
        compute: number of keys in one matrix product, a divisor of `kv`.
    """

    q: int
    kv: int
    compute: int


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of all kernels; None: chosen by sequence length.

    Attributes:
        block_q, block_kv, block_kv_compute: of the forward kernel.
        block_q_dkv, block_kv_dkv, block_kv_dkv_compute: of the kernel for the gradients of keys and values.
        block_q_dq, block_kv_dq: of the kernel for the gradient of queries.
        fused_backward: whether one kernel computes all gradients.
    """

    block_q: int | None = None
    block_kv: int | None = None
    block_kv_compute: int | None = None
    block_q_dkv: int | None = None
    block_kv_dkv: int | None = None
    block_kv_dkv_compute: int | None = None
    block_q_dq: int | None = None
    block_kv_dq: int | None = None
    fused_backward: bool = False

    def problem(self) -> str | None:
        """Why these sizes are not valid, and which are; None if they are."""
        for name, size in self._sizes().items():
            if size is not None and size % LANES:
                raised = -(-size // LANES) * LANES
                return f"{name}={size} is not a multiple of {LANES}. Set it to {raised}, or to None"
        for name, whole in (("block_kv_compute", "block_kv"), ("block_kv_dkv_compute", "block_kv_dkv")):
            part, size = self._sizes()[name], self._sizes()[whole]
            if part is not None and size is None:
                return f"{name}={part} requires {whole}. Set {whole} to a multiple of {part}"
            if part is not None and size is not None and size % part:
                divisors = [str(each) for each in range(LANES, size + 1, LANES) if size % each == 0]
                return f"{name}={part} does not divide {whole}={size}. Set it to {' or '.join(divisors)}"
        if self.fused_backward:
            for name in ("block_q_dq", "block_kv_dq"):
                if self._sizes()[name] is not None:
                    return f"{name}={self._sizes()[name]} has no effect with fused_backward=True. Set it to None"
        return None

    def forward(self, query_len: int, key_len: int) -> Tile:
        """The blocks of the forward kernel."""
        return _tile(self.block_q, self.block_kv, self.block_kv_compute, query_len, key_len)

    def dkv(self, query_len: int, key_len: int) -> Tile:
        """The blocks of the kernel for the gradients of keys and values, or for all gradients."""
        return _tile(self.block_q_dkv, self.block_kv_dkv, self.block_kv_dkv_compute, query_len, key_len)

    def dq(self, query_len: int, key_len: int) -> Tile:
        """The blocks of the kernel for the gradient of queries."""
        return _tile(self.block_q_dq, self.block_kv_dq, None, query_len, key_len)

    def _sizes(self) -> dict[str, int | None]:
        return {name: size for name, size in vars(self).items() if name.startswith("block_")}


def default_block(length: int) -> int:
    """The largest power of two up to `LARGEST_DEFAULT` that pads a sequence by at most `MAX_PADDING` more than the
    smallest block does."""
    shortest, block = padded(length, LANES), LARGEST_DEFAULT
    while block > LANES and padded(length, block) > shortest * (1 + MAX_PADDING):
        block //= 2
    return block


def padded(length: int, block: int) -> int:
    """The smallest multiple of `block` that is at least `length`."""
    return -(-length // block) * block


def _tile(q: int | None, kv: int | None, compute: int | None, query_len: int, key_len: int) -> Tile:
    """The given or default sizes, limited to the length of the sequence."""
    q, kv = (
        min(block or default_block(length), padded(length, LANES)) for block, length in ((q, query_len), (kv, key_len))
    )
    return Tile(q, kv, math.gcd(compute or kv, kv))
