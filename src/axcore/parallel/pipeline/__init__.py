"""Pipeline schedules: which operation each stage runs when."""

from axcore.parallel.pipeline.schedules import GPipe, OneForwardOneBackward, PipelineSchedule, ZeroBubble
from axcore.parallel.pipeline.tables import Op, Order, Table, Task

__all__ = ["GPipe", "OneForwardOneBackward", "Op", "Order", "PipelineSchedule", "Table", "Task", "ZeroBubble"]


def __dir__() -> list[str]:
    return __all__
