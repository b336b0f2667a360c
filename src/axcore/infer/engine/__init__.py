"""The engine: answers requests in a thread that owns the device."""

from axcore.infer.engine.base import BaseEngine
from axcore.infer.engine.engine import Engine

__all__ = ["BaseEngine", "Engine"]


def __dir__() -> list[str]:
    return __all__
