"""Device time of a training step by kind of kernel, from the profiler."""

from __future__ import annotations

import collections
import glob
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

KINDS = (
    ("collectives", r"nccl"),
    ("attention", r"fmha|flash|sdpa|attention"),
    ("products", r"gemm|nvjet|cutlass|cublas|matmul|xmma|ragged_dot|grouped_(rows|sums)"),
    ("copies", r"memcpy|memset|copy"),
)
"""Kind of kernel -> pattern of its names. Every other kernel is of the kind `elementwise`."""
Interval = tuple[float, float]


def summary(run: Callable[[], Any], steps: int = 3, top: int = 12) -> dict[str, Any]:
    """Milliseconds of one step on the first GPU.

    Returns:
        The milliseconds of each kind of kernel; `exposed_collectives`, during which no other kernel runs; `idle`,
        during which no kernel runs; `step`, from the first kernel to the last, divided by the number of steps; and the
        kernels that take longest.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # which slows the host down
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(steps):
                out = run()
            jax.block_until_ready(out)
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        events = list(_events(file))
    begin, end = min(each[1] for each in events), max(each[2] for each in events)
    times: collections.Counter[str] = collections.Counter()
    names: collections.Counter[str] = collections.Counter()
    for name, start, stop in events:
        times[_kind(name)] += stop - start
        names[re.sub(r"[_.]?\d+", "", name)[:60]] += stop - start
    work = _union((start, stop) for name, start, stop in events if _kind(name) != "collectives")
    everything = _union((start, stop) for _, start, stop in events)

    def per_step(nanoseconds: float) -> float:
        return round(nanoseconds / 1e6 / steps, 2)

    return {
        **{kind: per_step(time) for kind, time in times.items()},
        "exposed_collectives": per_step(everything - work),
        "idle": per_step(end - begin - everything),
        "step": per_step(end - begin),
        "longest": {name: per_step(time) for name, time in names.most_common(top)},
    }


def _events(file: str) -> Iterable[tuple[str, float, float]]:
    """(kernel, start, end) in nanoseconds on the first GPU."""
    for plane in jax.profiler.ProfileData.from_file(file).planes:
        if "/device:GPU:0" not in plane.name:
            continue
        for line in plane.lines:
            if "Stream" in line.name:
                for event in line.events:
                    yield event.name, event.start_ns, event.start_ns + event.duration_ns


def _kind(kernel: str) -> str:
    found = (kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE))
    return next(found, "elementwise")


def _union(intervals: Iterable[Interval]) -> float:
    """The length of the union of the intervals."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
