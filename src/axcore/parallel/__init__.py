"""The mesh, logical axes and remat policies."""

import axcore.parallel.codecs
import axcore.preflight  # noqa: F401 - before anything below imports flax
from axcore.parallel.axes import LOGICAL_AXES
from axcore.parallel.mesh import FSDP_RULES, Layout, Mesh, active_layout, constrain, is_sharded
from axcore.parallel.remat import Remat, SaveMatmuls, SaveNames
from axcore.parallel.shard import shard_map

__all__ = [
    "FSDP_RULES",
    "LOGICAL_AXES",
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
