"""Decoding from pages on one GPU: `python benchmarks/paged_attention.py`.

Compares axcore-paged-attention with gathering the pages and attending with XLA. Each case is first checked against
NumPy float64. The time of a call is that of a program of several calls on different layers, divided by their number, so
that neither the host nor the L2 cache counts. Bandwidth counts the keys, values and scales of live tokens. Prints one
JSON line for each case, the settings tried included, and ends within about `--seconds`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from copy_bandwidth import copy_bandwidth

import axcore as ax
from axcore.nn import AttentionInputs, Causal, KernelRequest, Paged, ReferenceKernel, TokenInfo
from axcore.nn.kv.codes import encoded
from axcore_paged_attention.kernel import PagedAttention


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of a step. `mean` is the mean number of tokens; rows have from half to one and a half of it."""

    name: str
    rows: int
    mean: int
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    page_size: int = 16
    codes: str | None = None

    @property
    def lengths(self) -> np.ndarray:
        lengths = np.linspace(0.5, 1.5, self.rows) * self.mean if self.rows > 1 else np.array([self.mean])
        return np.random.default_rng(0).permutation(lengths.astype(np.int32))

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that a call must read."""
        each = 2 * self.head_dim if self.codes is None else self.head_dim + 4
        return int(self.lengths.sum()) * self.kv_heads * 2 * each


CASES = (
    Case("7b, 64 rows", 64, 640),
    Case("gqa 32/8, 64 rows", 64, 640, kv_heads=8),
    Case("7b, 64 rows, int8", 64, 640, codes="int8"),
    Case("7b, 1 row", 1, 1024),
    Case("7b, 64 rows, page 64", 64, 640, page_size=64),
    Case("gqa 32/8, 64 rows, int8", 64, 640, kv_heads=8, codes="int8"),
    Case("7b, 1 row, page 64", 1, 1024, page_size=64),
    Case("7b, 1 row, contiguous", 1, 1024, page_size=1024),
    Case("gqa 32/8, 1 row", 1, 1024, kv_heads=8),
    Case("7b, 1 row, int8", 1, 1024, codes="int8"),
)
SMALL = (
    Case("3 rows", 3, 40, 4, 4, 32),
    Case("3 rows, grouped", 3, 40, 4, 2, 32),
    Case("1 row, int8", 1, 40, 4, 4, 32, codes="int8"),
)


def inputs(case: Case, layers: int, layer: int = 0) -> AttentionInputs:
    """One query for each row. The pages of a row are in random order."""
    lengths, size = case.lengths, case.page_size
    per_row = -(-int(lengths.max()) // size)
    counts = -(-lengths // size)
    pages = np.random.default_rng(1).permutation(int(counts.sum()))
    table = np.full((case.rows, per_row), pages.size, np.int32)
    for row, part in enumerate(np.split(pages, np.cumsum(counts)[:-1])):
        table[row, : part.size] = part
    keys = jax.random.split(jax.random.key(layer), 3)

    def pool(key: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        x = jax.random.normal(key, (pages.size, size, case.kv_heads, case.head_dim), jnp.bfloat16)
        x, scale = (x, None) if case.codes is None else encoded(x, case.codes)
        return jnp.tile(x, (layers, 1, 1, 1, 1)), None if scale is None else jnp.tile(scale, (layers, 1, 1, 1))

    (k, k_scale), (v, v_scale) = jax.jit(pool)(keys[0]), jax.jit(pool)(keys[1])
    scales = None if k_scale is None else (k_scale, v_scale)
    q = jax.random.normal(keys[2], (case.rows, 1, case.heads, case.head_dim), jnp.bfloat16)
    index = jnp.arange(per_row * size, dtype=jnp.int32)[None]
    end = jnp.asarray(lengths)
    view = Paged(
        k,
        v,
        jnp.asarray(table),
        TokenInfo(index, index, valid=index < end[:, None]),
        end,
        (jnp.int32(layer),),
        scales,
        None if scales is None else jnp.bfloat16,
    )
    place = end[:, None] - 1
    return AttentionInputs(q, view, TokenInfo(place, place), scale=case.head_dim**-0.5, mask=Causal(), phase="decode")


def kernel(**fields: Any) -> PagedAttention:
    built: PagedAttention = PagedAttention.Config(head_dim=128, **fields).build(rngs=ax.Rngs(0))
    return built


def gathered(given: AttentionInputs) -> jax.Array:
    """Attention of the reference kernel to copies of the pages."""
    reference = ReferenceKernel.Config(head_dim=128).build(rngs=ax.Rngs(0))
    return reference(given.replace(kv=given.plain))[0]


def check(case: Case, interpret: bool) -> float:
    """The largest error of a head against float64, divided by the largest head."""
    case = dataclasses.replace(case, rows=min(case.rows, 4))
    given = inputs(case, 1)
    found = jax.jit(lambda given: kernel(interpret=interpret)(given)[0])(given)
    plain = given.plain if case.codes is None else dataclasses.replace(given.keys, read_as=jnp.float32).gathered()
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (given.q, plain.k, plain.v))
    group = case.heads // case.kv_heads
    logits = given.scale * np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, group, axis=2))
    seen = np.arange(k.shape[1]) < case.lengths[:, None]
    weights = np.where(seen[:, None, None], np.exp(logits - logits.max(-1, keepdims=True)), 0)
    weights /= weights.sum(-1, keepdims=True)
    right = np.einsum("bhqk,bkhd->bqhd", weights, np.repeat(v, group, axis=2))
    return float(np.abs(np.asarray(found.astype(jnp.float32)) - right).max() / np.abs(right).max())


def microseconds(attend: Callable[[AttentionInputs], jax.Array], given: AttentionInputs, layers: int) -> float:
    """The time of one call: the fastest of five programs with a call for each layer."""

    def program(given: AttentionInputs) -> jax.Array:
        for layer in range(layers):
            view = dataclasses.replace(given.keys, layer=(jnp.int32(layer),))
            given = given.replace(q=attend(given.replace(kv=view)))
        return given.q

    compiled = jax.jit(program).lower(given).compile()
    jax.block_until_ready(compiled(given))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(4):
            out = compiled(given)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / 4 / layers)
    return 1e6 * min(times)


def attempt(fn: Callable[[], Any]) -> Any:
    """The result, or the error as text: one case that fails does not end the run."""
    try:
        return fn()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def settings(given: AttentionInputs) -> Iterator[dict[str, int]]:
    """The candidates of `axcore tune`, without the default."""
    yield from list(kernel().candidates(KernelRequest.of(given)))[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--interpret", action="store_true", help="small shapes in the Pallas interpreter, on a CPU")
    parser.add_argument("--cases", nargs="*", help="names; all by default")
    arguments = parser.parse_args()
    deadline = time.perf_counter() + arguments.seconds
    cases = [
        case
        for case in (SMALL if arguments.interpret else CASES)
        if not arguments.cases or case.name in arguments.cases
    ]
    copied = copy_bandwidth() / 1e9
    results: dict[str, dict[str, Any]] = {case.name: {"case": case.name} for case in cases}

    def add(case: Case, label: str, fn: Callable[[], Any]) -> None:
        found = results[case.name][label] = attempt(fn) if time.perf_counter() < deadline else "out of time"
        print(case.name, label, found, flush=True)

    def timed(case: Case, **fields: Any) -> dict[str, float]:
        took = microseconds(lambda given: kernel(interpret=arguments.interpret, **fields)(given)[0], *prepared(case))
        speed = case.bytes / took / 1e3
        return {"us": round(took, 2), "GB/s": round(speed), "share of copy": round(speed / copied, 3)}

    @functools.cache
    def prepared(case: Case) -> tuple[AttentionInputs, int]:
        layers = 2 if arguments.interpret else int(np.clip(2e9 // case.bytes, 4, 16))
        return inputs(case, layers), layers

    for case in cases:
        add(case, "error", lambda case=case: check(case, arguments.interpret))
        add(case, "kernel", lambda case=case: timed(case))
    for case in cases:
        add(case, "gathered us", lambda case=case: round(microseconds(gathered, *prepared(case)), 2))
    tried = {case.name: list(settings(inputs(case, 1))) for case in cases[: 2 if arguments.interpret else 4]}
    for number in range(max(map(len, tried.values()))):
        for case in cases:
            if number < len(tried.get(case.name, ())) and time.perf_counter() < deadline:
                one = tried[case.name][number]
                add(case, json.dumps(one), lambda case=case, one=one: timed(case, **one))
    device = jax.devices()[0].device_kind
    print(json.dumps({"device": device, "jax": jax.__version__, "copy GB/s": round(copied)}))
    for result in results.values():
        print(json.dumps(result))


if __name__ == "__main__":
    main()
