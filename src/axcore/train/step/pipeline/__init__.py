"""Gradients of a model whose layers are divided into pipeline stages."""

from axcore.train.step.pipeline.gradient import pipelined
from axcore.train.step.pipeline.permutes import check_permutes
from axcore.train.step.pipeline.stack import PipelinedStack, pipelined_stack

__all__ = ["PipelinedStack", "check_permutes", "pipelined", "pipelined_stack"]


def __dir__() -> list[str]:
    return __all__
