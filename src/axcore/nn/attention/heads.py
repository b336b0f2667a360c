"""The check that a mesh splits attention between heads."""

from __future__ import annotations

from axcore.config import Config, ConfigError, walk
from axcore.nn.attention.base import BaseAttention
from axcore.parallel import Layout
from axcore.parallel.axes import group_of
from axcore.parallel.layout import nearest_divisors


def check_heads(model: Config, layout: Layout, where: str) -> None:
    """Checks that the shards of `head` divide the heads of every attention layer.

    The weights would be split inside a head, and every device would compute the attention of all heads. Key and value
    heads are not checked, because each device gets those that its query heads use.

    Args:
        where: the path of the model, for the message.

    Raises:
        ConfigError: they do not.
    """
    axes = group_of(layout.spec(("batch", "head"))[1])  # axes that shard the batch do not shard heads
    shards = layout.size_of(axes)
    for path, node in walk(model):
        if not isinstance(node, BaseAttention.Config) or not isinstance(node.num_heads, int):
            continue
        heads = node.num_heads
        if heads % shards:
            raise ConfigError(
                f"{'.'.join(filter(None, (where, path)))}: num_heads={heads} is not a multiple of {shards}, the number "
                f"of devices that share the heads ({layout.described(axes)}). Possible numbers of devices: "
                f"{nearest_divisors(heads, shards)}. Change mesh.shape or num_heads, or replicate the heads by leaving "
                f"'head' and 'kv_head' out of mesh.rules"
            )
