"""Counts compilations of functions in this process."""

from __future__ import annotations

import collections
from typing import Any

import jax

_counts: collections.Counter[str] = collections.Counter()


def _record(event: str, duration_secs: float, **details: Any) -> None:
    del duration_secs
    if event == "/jax/core/compile/backend_compile_duration":
        _counts[str(details.get("fun_name", ""))] += 1


jax.monitoring.register_event_duration_secs_listener(_record)


def compilations(name: str) -> int:
    """The number of compilations of jitted functions of this name so far, including hits of the disk cache."""
    return _counts[f"jit({name})"]
