"""Context parallelism: how attention is computed when the rules shard the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import axcore.config
from axcore.config import Configurable

if TYPE_CHECKING:  # attention is above this package
    from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
    from axcore.nn.attention.kernel import AttentionKernel
    from axcore.nn.attention.request import KernelRequest


class ContextParallelism(Configurable):
    """Base of the strategies of context parallelism, for `Mesh.context`.

    If the rules shard `seq`, each device has a part of the queries, keys and values. A strategy computes attention from
    these parts with the kernel that the config names. Without a strategy, keys and values are gathered on every device.
    """

    tags_heads: ClassVar[bool] = False
    """Whether the strategy itself tags its result as `heads` for remat policies. A strategy with a custom gradient
    must."""

    class Config(axcore.config.Config):
        """Base of the configs of these strategies."""

    def __init__(self, cfg: Config):
        self.config = cfg

    def refusal(self, request: KernelRequest, shards: int) -> str | None:
        """The reason if the strategy cannot compute this call, such as "requires num_heads to be ..."; None if it can.

        Args:
            request: The call on one device, whose `query_len` and `key_len` are those of its part of the sequence.
            shards: The number of parts of the sequence.
        """
        return None

    def requests(self, request: KernelRequest, shards: int) -> tuple[KernelRequest, ...]:
        """The different kernel calls that `attend` makes on one device. The arguments are those of `refusal`."""
        raise NotImplementedError

    def attend(
        self, kernel: AttentionKernel, inputs: AttentionInputs, axes: tuple[str, ...], shards: int
    ) -> tuple[Heads, LSE | None]:
        """Computes the heads of the queries of this device, inside a `shard_map` over all mesh axes.

        Args:
            kernel: A kernel that supports all `requests`.
            inputs: The part of this device. `kv` is a `Contiguous`. If queries and keys are the same tokens, `query` is
                `kv.tokens`.
            axes: The mesh axes that shard the sequence, for collectives.
            shards: The number of parts: the product of the sizes of `axes`.

        Returns:
            As `AttentionKernel.__call__`, for the queries of this device.
        """
        raise NotImplementedError
