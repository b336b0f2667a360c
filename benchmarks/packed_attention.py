"""Time and memory of cuDNN attention on packed rows, on one GPU: `python benchmarks/packed_attention.py`.

Prints milliseconds (median of five runs of five calls) and GiB of temporaries, for the forward pass and for forward and
backward pass, with plain causal attention and with several numbers of documents per row.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore_cudnn.fused import Operands, attention
from axcore_cudnn.primitives import Form


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs=5, default=[8, 2048, 32, 8, 128], metavar="N",
                        help="rows, tokens, heads, kv heads, head_dim")  # fmt: skip
    parser.add_argument("--documents", type=int, default=8, help="see CudnnKernel.Config")
    parser.add_argument("--window", type=int)
    arguments = parser.parse_args()
    batch, seq, heads, kv_heads, dim = arguments.shape
    form = Form(dim**-0.5, window=arguments.window, documents=arguments.documents)
    keys = jax.random.split(jax.random.key(0), 4)
    widths = (heads, kv_heads, kv_heads, heads)
    q, k, v, grad = (
        jax.random.normal(key, (batch, seq, n, dim), jnp.bfloat16) for key, n in zip(keys, widths, strict=True)
    )
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {arguments}")
    rows: dict[str, Any] = {"plain causal": None}
    rows |= {f"{n} documents per row": jnp.asarray(even(batch, seq, n)) for n in (1, 4, 16, 64)}
    mixed = lognormal(batch, seq)
    rows[f"random lengths, {mixed.max(1).mean():.1f} documents per row"] = jnp.asarray(mixed)
    for name, ids in rows.items():

        def forward(q: Any, k: Any, v: Any, ids: Any) -> Any:
            return attention(form, q, k, v, Operands(ids))[0]

        def both(q: Any, k: Any, v: Any, ids: Any, grad: Any) -> Any:
            out, pull = jax.vjp(lambda *x: forward(*x, ids), q, k, v)
            return out, *pull(grad)

        measured = [measure(forward, q, k, v, ids), measure(both, q, k, v, ids, grad)]
        print(f"{name:40s}" + "".join(f"  {ms:8.3f} ms {gib:6.2f} GiB" for ms, gib in measured))


def even(batch: int, seq: int, count: int) -> np.ndarray:
    """Segment ids of documents of equal length."""
    return (np.arange(seq) * count // seq + 1)[None].repeat(batch, 0).astype(np.int32)


def lognormal(batch: int, seq: int) -> np.ndarray:
    """Segment ids of documents of random length: median 403 tokens, at least 10, cut at the end of the row."""
    random, ids = np.random.default_rng(0), np.zeros((batch, seq), np.int32)
    for row in ids:
        start, number = 0, 1
        while start < seq:
            length = int(np.clip(random.lognormal(6, 1), 10, seq))
            row[start : start + length] = number
            start, number = start + length, number + 1
    return ids


def measure(fn: Any, *arrays: Any) -> tuple[float, float]:
    compiled = jax.jit(fn).lower(*arrays).compile()
    for _ in range(3):
        jax.block_until_ready(compiled(*arrays))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(5):
            found = compiled(*arrays)
        jax.block_until_ready(found)
        times.append((time.perf_counter() - start) / 5)
    return 1e3 * float(np.median(times)), compiled.memory_analysis().temp_size_in_bytes / 2**30


if __name__ == "__main__":
    main()
