"""Caching by class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def cached[F: Callable[..., Any]](fn: F) -> F:
    """`functools.cache` that keeps the signature for type checkers, which do not take a class as hashable."""
    return functools.cache(fn)  # type: ignore[return-value]
