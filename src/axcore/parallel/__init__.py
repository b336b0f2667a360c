"""The mesh, logical axes and remat policies."""

import axcore.parallel.codecs
import axcore.preflight  # noqa: F401 - before anything below imports flax
from axcore.parallel.axes import LOGICAL_AXES, MESH_AXES, STANDARD_RULES
from axcore.parallel.context import ContextParallelism
from axcore.parallel.layout import Layout, active_layout, constrain, is_sharded
from axcore.parallel.mesh import Mesh
from axcore.parallel.remat import Remat, SaveMatmuls, SaveNames
from axcore.parallel.shard import shard_map

__all__ = [
    "LOGICAL_AXES",
    "MESH_AXES",
    "STANDARD_RULES",
    "ContextParallelism",
    "Layout",
    "Mesh",
    "Remat",
    "SaveMatmuls",
    "SaveNames",
    "active_layout",
    "constrain",
    "is_sharded",
    "shard_map",
]


def __dir__() -> list[str]:
    return __all__
