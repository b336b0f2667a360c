"""The bandwidth of a copy in device memory, which bounds what reading weights and caches can reach."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp


def copy_bandwidth() -> float:
    """Bytes per second, read and written together: the fastest of five runs of ten copies of 1 GiB. On other devices
    than GPUs, the array has 1 MiB."""
    x = jnp.zeros(2**28 if jax.default_backend() == "gpu" else 2**18, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(x))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10):
            out = copy(x)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / 10)
    return 2 * x.nbytes / min(times)
