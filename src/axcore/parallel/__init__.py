"""The mesh, logical axes and remat policies."""

from axcore.parallel.mesh import FSDP_RULES, Layout, Mesh, constrain, is_sharded
from axcore.parallel.remat import Remat, SaveMatmuls, SaveNames
from axcore.parallel.shard import shard_map

__all__ = ["FSDP_RULES", "Layout", "Mesh", "Remat", "SaveMatmuls", "SaveNames", "constrain", "is_sharded", "shard_map"]
