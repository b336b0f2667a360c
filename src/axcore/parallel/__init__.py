"""The mesh, logical axes, remat policies and compiler options."""

import axcore.parallel.codecs
import axcore.preflight  # noqa: F401 - before anything below imports flax
from axcore.parallel.axes import LOGICAL_AXES, MESH_AXES, STANDARD_RULES
from axcore.parallel.compiler_options import CheckedOption, CompilerOptions, check_options, checked_options
from axcore.parallel.context import ContextParallelism
from axcore.parallel.layout import Layout, active_layout, check_gathers, constrain, is_sharded, target_device
from axcore.parallel.mesh import Mesh
from axcore.parallel.pipeline import PipelineSchedule
from axcore.parallel.remat import TAGS, ByKind, ByTag, Remat, SaveMatmuls
from axcore.parallel.shard import shard_map

__all__ = [
    "LOGICAL_AXES",
    "MESH_AXES",
    "STANDARD_RULES",
    "TAGS",
    "ByKind",
    "ByTag",
    "CheckedOption",
    "CompilerOptions",
    "ContextParallelism",
    "Layout",
    "Mesh",
    "PipelineSchedule",
    "Remat",
    "SaveMatmuls",
    "active_layout",
    "check_gathers",
    "check_options",
    "checked_options",
    "constrain",
    "is_sharded",
    "shard_map",
    "target_device",
]


def __dir__() -> list[str]:
    return __all__
