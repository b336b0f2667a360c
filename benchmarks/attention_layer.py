"""An attention layer of axcore against the same projections around a direct call of the cuDNN kernel, on one GPU.

Prints one JSON object per length: milliseconds of the forward and backward pass of both, and the median ratio of
alternating runs. A row of `--seq` tokens is one document.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axcore as ax
from axcore.nn import Attention, TokenInfo
from axcore_cudnn.fused import Operands, attention
from axcore_cudnn.primitives import Form


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"dim": 2048, "heads": 32, "kv-heads": 8, "tokens": 32_768, "pairs": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seq", type=int, nargs="+", default=[4096, 16_384])
    given = parser.parse_args()
    for seq in given.seq:
        print(json.dumps({"seq": seq} | compared(given, seq) | {"card": jax.devices()[0].device_kind}), flush=True)


def compared(given: argparse.Namespace, seq: int) -> dict[str, Any]:
    head_dim = given.dim // given.heads
    cfg = Attention.Config(
        input_dim=given.dim,
        num_heads=given.heads,
        num_kv_heads=given.kv_heads,
        dtypes=ax.DTypes(compute=jnp.bfloat16),
    )
    cfg = ax.pipe(cfg, ax.use("kernels", order=("cudnn",)))
    fn, params, state = ax.functional(cfg.build(rngs=ax.Rngs(0)))
    shape = (given.tokens // seq, seq)
    x, grad = jax.random.normal(jax.random.key(1), (2, *shape, given.dim), jnp.bfloat16)
    segment_ids = jnp.ones(shape, jnp.int32)

    def layer(params: Any, x: Any) -> Any:
        return fn(params, state, x, TokenInfo.of(segment_ids, segment_ids=segment_ids))[0][0]

    def bare(params: Any, x: Any) -> Any:
        flat = x.reshape(-1, given.dim)
        q, k, v = (
            (flat @ params[name]["weight"].astype(x.dtype)).reshape(*shape, -1, head_dim)
            for name in ("query", "key", "value")
        )
        heads = attention(Form(head_dim**-0.5), q, k, v, Operands(segment_ids))[0]
        return (heads.reshape(-1, given.dim) @ params["projection"]["weight"].astype(x.dtype)).reshape(x.shape)

    runs = [both(each, params, x, grad) for each in (layer, bare)]
    times = np.array([[seconds(run, params, x, grad) for run in runs] for _ in range(given.pairs)])
    mine, theirs = (float(np.median(times[:, at])) for at in (0, 1))
    outputs = [run(params, x, grad)[0] for run in runs]
    return {
        "layer_ms": round(1e3 * mine, 3),
        "bare_ms": round(1e3 * theirs, 3),
        "ratio": round(float(np.median(times[:, 0] / times[:, 1])), 4),
        "largest_difference": float(jnp.abs(outputs[0].astype(jnp.float32) - outputs[1]).max()),
    }


def both(fn: Any, params: Any, x: Any, grad: Any) -> Any:
    def run(params: Any, x: Any, grad: Any) -> Any:
        out, pull = jax.vjp(fn, params, x)
        return out, *pull(grad)

    compiled = jax.jit(run).lower(params, x, grad).compile()
    for _ in range(3):
        jax.block_until_ready(compiled(params, x, grad))
    return compiled


def seconds(run: Any, *arrays: Any, calls: int = 5) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        found = run(*arrays)
    jax.block_until_ready(found)
    return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    main()
