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
from axcore_cudnn.fp8 import Form as Fp8Form, Histories, fp8_attention
from axcore_cudnn.fused import attention
from axcore_cudnn.kernel import CudnnKernel
from axcore_cudnn.primitives import Form, forward

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
    parser.add_argument("--tokens", type=int, default=32_768, help="of a timed training call")
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
        for delayed in (False, True):
            yield f"fp8, {'delayed' if delayed else 'current'}, {name}", lambda c=case, d=delayed: fp8_errors(c, d)
    for name, case in MASKED.items():
        yield f"bias, {name}", lambda c=case: masked_errors(c)
    for seq in given.seq:
        yield f"time of attention, {seq} tokens", lambda s=seq: training_times(given.tokens // s, s)
    yield "time of one decoded token, 32 rows, 4096 keys, half of them valid", lambda: decoding_times(32, 4096)


def masked_errors(case: Case) -> Result:
    """The largest errors of a call with a bias; a correct kernel has at most 4 everywhere."""
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


def fp8_errors(case: Case, delayed: bool, steps: int = 3) -> Result:
    """Relative errors in the first and in the last step, the sizes along the exact results, and overflow."""
    arrays, grad = arrays_of(case, "bfloat16"), gradient(case)
    form = Fp8Form(case.scale, isinstance(case.mask, Causal))
    expected = formula(case, arrays, np.asarray(grad, np.float64))

    @jax.jit
    def step(arrays: Any, histories: Histories) -> Any:
        (heads, overflow), pull = jax.vjp(lambda *x: fp8_attention(form, *x), *arrays, histories)
        return heads, overflow, *pull((grad, jnp.zeros_like(overflow)))

    zeros = jnp.zeros((4, 4))
    histories, found = Histories(zeros if delayed else None, zeros, jnp.zeros(())), []
    for _ in range(steps):
        heads, overflow, *grads, histories = step([arrays[name] for name in "qkv"], histories)
        found.append((dict(zip(("heads", "q", "k", "v"), (heads, *grads), strict=True)), float(overflow)))
    exact = {"heads": expected.heads, **expected.grads}

    def compared(which: dict[str, Any]) -> Result:
        wide = {name: np.asarray(each, np.float64) for name, each in which.items()}
        errors = {name: np.linalg.norm(wide[name] - each) / np.linalg.norm(each) for name, each in exact.items()}
        along = {name: (wide[name] * each).sum() / (each * each).sum() for name, each in exact.items()}
        return {name: [round(float(errors[name]), 4), round(float(along[name]), 4)] for name in exact}

    return {
        "first step (error, size)": compared(found[0][0]),
        "last step (error, size)": compared(found[-1][0]),
        "overflow": [each[1] for each in found],
        "gradient_overflow": float(histories.overflow),
        "amaxes of logits, q, k, v": np.asarray(histories.gradients[:, 0]).round(5).tolist(),
    }


def gradient(case: Case) -> jax.Array:
    width = case.head_dim if case.value_dim is None else case.value_dim
    shape = (2, case.query_len, case.heads, width)
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.bfloat16)


def training_times(batch: int, seq: int) -> Result:
    """Causal attention in bfloat16 and in FP8, which includes the rounding of its operands."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, grad = (jax.random.normal(key, (batch, seq, HEADS, HEAD_DIM), jnp.bfloat16) for key in keys)
    scale, history = HEAD_DIM**-0.5, jnp.zeros((4, 16))

    def wide(q: Any, k: Any, v: Any) -> Any:
        return attention(Form(scale), q, k, v)[0]

    def narrow(histories: Histories) -> Any:
        return lambda q, k, v: fp8_attention(Fp8Form(scale, True), q, k, v, histories)[0]

    def both(fn: Any) -> Any:
        def run(q: Any, k: Any, v: Any, grad: Any) -> Any:
            heads, pull = jax.vjp(fn, q, k, v)
            return heads, *pull(grad)

        return run

    current = Histories(None, history + 0.1, jnp.zeros(()))
    kinds = {
        "bf16": wide,
        "fp8": narrow(current),
        "fp8 delayed": narrow(dataclasses.replace(current, inputs=history + 8)),
    }
    found = {name: [guarded(fn, q, k, v), guarded(both(fn), q, k, v, grad)] for name, fn in kinds.items()}
    flops = 4 * batch * HEADS * seq * seq * HEAD_DIM / 2
    bare = found["bf16"]
    speed = {
        name: round(bare[1] / times[1], 3)
        for name, times in found.items()
        if isinstance(times[1], float) and isinstance(bare[1], float)
    }
    rates = {
        name: [round(flops * factor / ms / 1e9) for factor, ms in zip((1, 3.5), times, strict=True)]
        for name, times in found.items()
        if all(isinstance(ms, float) for ms in times)
    }
    return {"rows": batch, "ms (forward, both)": found, "TFLOP/s (forward, both)": rates, "speed of both": speed}


def decoding_times(batch: int, length: int) -> Result:
    """One query against a KV cache: the kernel, the call without a bias, and the reference kernel."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (batch, 1, HEADS, HEAD_DIM), jnp.bfloat16)
    k, v = (jax.random.normal(key, (batch, length, 8, HEAD_DIM), jnp.bfloat16) for key in keys[1:])
    index, lengths = jnp.arange(length)[None], jnp.full(batch, length // 2)
    key_tokens = TokenInfo(index, index, None, index < lengths[:, None])
    at = lengths[:, None] - 1

    def run(kernel: Any) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            kv = Contiguous(k, v, key_tokens)
            return kernel(
                AttentionInputs(q, kv, TokenInfo(at, at), scale=HEAD_DIM**-0.5, mask=Causal(), phase="decode")
            )[0]

        return call

    def by_lengths(q: Any, k: Any, v: Any) -> Any:
        form = Form(HEAD_DIM**-0.5, causal=False)
        return forward(form, q, k, v, lengths=(jnp.ones(batch, jnp.int32), lengths.astype(jnp.int32)))[0]

    kernels = {"cudnn": CudnnKernel, "reference": ReferenceKernel}
    found = {
        name: guarded(run(kind.Config(head_dim=HEAD_DIM).build(rngs=ax.Rngs(0))), q, k, v)
        for name, kind in kernels.items()
    }
    found["cudnn, lengths without a bias"] = guarded(by_lengths, q, k, v)
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
