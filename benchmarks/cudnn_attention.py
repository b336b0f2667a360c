"""cuDNN attention on one GPU: errors against NumPy float64, and times. `python benchmarks/cudnn_attention.py`

Errors of bfloat16 are in units of those that a correct kernel may have (see `KernelSuite`); FP8 errors are relative.
Times are the medians of five runs of ten calls, in milliseconds. A case that raises does not end the run. The results
are printed last, one JSON object per line. Takes about 90 seconds on an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axcore as ax
from axcore.nn import AttentionInputs, Causal, Contiguous, Full, ReferenceKernel, TokenInfo
from axcore.testing.attention_cases import CASES, Case, arrays_of, by_head, formula, inputs_of
from axcore.testing.kernel import unit_error
from axcore_cudnn.fp8 import fp8_attention
from axcore_cudnn.fp8_calls import Form as Fp8Form
from axcore_cudnn.fused import attention
from axcore_cudnn.kernel import CudnnKernel
from axcore_cudnn.primitives import Form

HEADS, HEAD_DIM = 32, 128
"""Those of Llama2-7B."""
CACHED = Case(("decoding",), query_len=1, key_len=1024, start=800, written=801, behind=300, heads=32, kv_heads=8,
              head_dim=128, scale=0.1)  # fmt: skip
MASKED = {
    **{name: CASES[name] for name, case in CASES.items() if "decoding" in case.needs},
    **{name: CASES[name] for name in ("prefix", "union of two masks")},
    "one decoded token, 1024 keys, 32 / 8 heads": CACHED,
    "prefill of 127 tokens, 1024 keys": dataclasses.replace(CACHED, query_len=127, start=674),
}
ROW = Case(query_len=1024, key_len=1024, heads=4, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)
FP8 = {
    "causal": ROW,
    "full": dataclasses.replace(ROW, mask=Full(), allowed=lambda i, j, s, t: np.ones((1, 1, 1), bool)),
    "two heads per kv head": dataclasses.replace(ROW, kv_heads=2),
}

Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq", type=int, nargs="+", default=[4096, 16_384])
    parser.add_argument("--tokens", type=int, default=32_768, help="of a timed call without a cache")
    given = parser.parse_args()
    results = [{"card": jax.devices()[0].device_kind, "jax": jax.__version__}]
    for name, case in cases(given):
        began = time.perf_counter()
        try:
            found = case()
        except Exception as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
        results.append({"case": name} | found | {"seconds": round(time.perf_counter() - began, 1)})
    for result in results:
        print(json.dumps(result), flush=True)


def cases(given: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Result]]]:
    for name, case in FP8.items():
        yield f"fp8, {name}", lambda c=case: fp8_errors(c)
    yield "stale keys and values that are NaN, one decoded token", lambda: stale_nan(CACHED)
    for name, case in MASKED.items():
        yield f"lengths or bias, {name}", lambda c=case: masked_errors(c)
    for seq in given.seq:
        yield f"time of attention, {seq} tokens", lambda s=seq: times(given.tokens // s, s)
    yield "time of one decoded token, 32 rows, 4096 keys, half of them valid", lambda: decoding_times(32, 4096)


def masked_errors(case: Case) -> Result:
    """The largest errors of a call with lengths or a bias; a correct kernel has at most 4 everywhere."""
    kernel = CudnnKernel.Config(head_dim=case.head_dim).build(rngs=ax.Rngs(0))
    arrays = arrays_of(case, "bfloat16")
    grad = np.asarray(gradient(case), np.float64)
    expected = formula(case, arrays, grad)
    unit = unit_error("bfloat16", expected)

    def scalar(arrays: Any) -> Any:
        heads, lse = kernel(inputs_of(case, arrays, return_lse=True))
        return (heads.astype(jnp.float32) * grad).sum(), (heads, lse)

    grads, (heads, lse) = jax.jit(jax.grad(scalar, has_aux=True))(arrays)
    difference = np.abs(np.asarray(heads, np.float64) - expected.heads)
    errors = {"heads": float((difference / (unit * expected.heads_rounding + 1e-30)).max())}
    errors["lse"] = float(np.abs(np.asarray(lse) - expected.lse).max() / unit_error("float32", expected))
    for name, exact in expected.grads.items():
        wrong = np.linalg.norm(by_head(np.asarray(grads[name], np.float64)) - by_head(exact), axis=1)
        errors[name] = float((wrong / (unit * expected.roundings[name] + 1e-30)).max())
    return {"errors": {name: round(each, 2) for name, each in errors.items()}}


def fp8_errors(case: Case) -> Result:
    """The relative error of the heads, their size along the exact ones, and overflow."""
    arrays = arrays_of(case, "bfloat16")
    form = Fp8Form(case.scale, isinstance(case.mask, Causal))
    heads, overflow = jax.jit(lambda *x: fp8_attention(form, *x))(*(arrays[name] for name in "qkv"))
    found, exact = np.asarray(heads, np.float64), formula(case, arrays).heads
    error, along = np.linalg.norm(found - exact) / np.linalg.norm(exact), (found * exact).sum() / (exact * exact).sum()
    return {"error": round(float(error), 4), "size": round(float(along), 4), "overflow": float(overflow)}


def stale_nan(case: Case) -> Result:
    """Whether the heads are finite if the cache has NaN after the last valid key of each row."""
    kernel = CudnnKernel.Config(head_dim=case.head_dim).build(rngs=ax.Rngs(0))
    arrays = arrays_of(case, "bfloat16")
    valid = inputs_of(case, arrays).keys.tokens.valid
    assert valid is not None
    stale = {name: jnp.where(valid[..., None, None], arrays[name], jnp.nan) for name in "kv"}
    heads = jax.jit(lambda arrays: kernel(inputs_of(case, arrays))[0])(arrays | stale)
    return {"finite": bool(jnp.isfinite(heads).all())}


def gradient(case: Case) -> jax.Array:
    width = case.head_dim if case.value_dim is None else case.value_dim
    shape = (2, case.query_len, case.heads, width)
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.bfloat16)


def times(batch: int, seq: int) -> Result:
    """Causal attention in bfloat16, and its heads in FP8, which include the rounding of the operands."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, grad = (jax.random.normal(key, (batch, seq, HEADS, HEAD_DIM), jnp.bfloat16) for key in keys)
    scale = HEAD_DIM**-0.5

    def wide(q: Any, k: Any, v: Any) -> Any:
        return attention(Form(scale), q, k, v)[0]

    def both(q: Any, k: Any, v: Any, grad: Any) -> Any:
        heads, pull = jax.vjp(wide, q, k, v)
        return heads, *pull(grad)

    found = {
        "bf16": guarded(wide, q, k, v),
        "fp8": guarded(lambda *x: fp8_attention(Fp8Form(scale, True), *x)[0], q, k, v),
        "bf16, forward and backward": guarded(both, q, k, v, grad),
    }
    flops = 4 * batch * HEADS * seq * seq * HEAD_DIM / 2
    rates = {
        name: round(flops * (3.5 if "backward" in name else 1) / ms / 1e9)
        for name, ms in found.items()
        if isinstance(ms, float)
    }
    return {"rows": batch, "ms": found, "TFLOP/s": rates}


def decoding_times(batch: int, length: int) -> Result:
    """One query against a KV cache: the kernel, the kernel with a bias, and the reference kernel."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (batch, 1, HEADS, HEAD_DIM), jnp.bfloat16)
    k, v = (jax.random.normal(key, (batch, length, 8, HEAD_DIM), jnp.bfloat16) for key in keys[1:])
    index, lengths = jnp.arange(length)[None], jnp.full(batch, length // 2)
    key_tokens = TokenInfo(index, index, None, index < lengths[:, None], valid_first=True)
    at = lengths[:, None] - 1

    def run(kind: Any, tokens: TokenInfo) -> Any:
        kernel = kind.Config(head_dim=HEAD_DIM).build(rngs=ax.Rngs(0))

        def call(q: Any, k: Any, v: Any) -> Any:
            kv, query = Contiguous(k, v, tokens), TokenInfo(at, at)
            return kernel(AttentionInputs(q, kv, query, scale=HEAD_DIM**-0.5, mask=Causal(), phase="decode"))[0]

        return call

    found = {
        "cudnn": guarded(run(CudnnKernel, key_tokens), q, k, v),
        "cudnn with a bias": guarded(run(CudnnKernel, dataclasses.replace(key_tokens, valid_first=False)), q, k, v),
        "reference": guarded(run(ReferenceKernel, key_tokens), q, k, v),
    }
    gigabytes = 2 * batch * length // 2 * 8 * HEAD_DIM * 2 / 1e9
    speeds = {name: round(gigabytes / ms, 2) for name, ms in found.items() if isinstance(ms, float)}
    return {"ms": found, "TB/s of valid keys and values": speeds}


def guarded(fn: Any, *arrays: Any) -> float | str:
    """Milliseconds of a call, or why it fails."""
    try:
        return round(milliseconds(jax.jit(fn), *arrays), 4)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error)[:200]}"


def milliseconds(run: Any, *arrays: Any) -> float:
    jax.block_until_ready(run(*arrays))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(10):
            found = run(*arrays)
        jax.block_until_ready(found)
        times.append((time.perf_counter() - began) / 10)
    return 1e3 * float(np.median(times))


if __name__ == "__main__":
    main()
