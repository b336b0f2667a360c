"""The rows of a batch that each process reads."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from axcore.config import ConfigError
from axcore.parallel import Layout


def data_shard(layout: Layout) -> tuple[int, int]:
    """(index, count) of the shard of each batch that this process reads: the batch has `count` shards of equal size.

    Processes whose devices hold the same rows, as with tensor parallelism over several hosts, read the same shard.

    Raises:
        ConfigError: the rows of a process are not such a shard.
    """
    if jax.process_count() == 1:
        return 0, 1
    sharding = layout.sharding("batch")
    blocks = layout.size_of(sharding.spec[0])
    held: dict[int, set[int]] = {}
    for device, (rows,) in sharding.devices_indices_map((blocks,)).items():
        held.setdefault(device.process_index, set()).update(range(*rows.indices(blocks)))  # type: ignore[attr-defined]
    return shard_of_process(held, jax.process_index(), blocks)


def shard_of_process(held: Mapping[int, set[int]], process: int, blocks: int) -> tuple[int, int]:
    """(index, count) of one process; see `data_shard`.

    Args:
        held: process -> indices of the blocks of rows that its devices hold, of `blocks` in total.
    """
    size = len(held[process])
    for other, rows in held.items():
        first = min(rows)
        if len(rows) != size or first % size or rows != set(range(first, first + size)):
            raise ConfigError(
                f"mesh: of the {blocks} blocks of rows that mesh.rules divide a batch into, the devices of process "
                f"{other} hold {sorted(rows)}, and those of process {process} hold {sorted(held[process])}. Each "
                f"process must hold the same number of consecutive blocks. Choose a mesh.shape whose axes for 'batch' "
                f"are multiples or divisors of the number of processes."
            )
    return min(held[process]) // size, blocks // size
