"""Memory of the loss and its gradients, by `CrossEntropy.Config.chunk`: the tokens of a row whose logits exist at once.

Compiles a model without layers, so that almost only the loss takes memory, and times it with --run. Prints a table of
the temporary buffers in the compiled program, and a JSON object on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.module import abstract
from axcore.nn import CausalLM, Sequence
from axcore.train import CrossEntropy

MIB = 2**20


def measured(cfg: CausalLM.Config, chunk: int | None, batch: Any, run: bool) -> tuple[int, float | None]:
    """(bytes of temporary buffers in the compiled gradient step, median milliseconds per step)."""
    fn, params, _ = abstract(cfg)
    objective = CrossEntropy.Config(z_loss=1e-4, chunk=chunk).build()

    def value(params: Any, batch: Any) -> jax.Array:
        return objective.value(fn, params, {}, batch)

    compiled = jax.jit(jax.value_and_grad(value)).lower(params, batch).compile()
    size, times = compiled.memory_analysis().temp_size_in_bytes, []
    if not run:
        return size, None
    given = jax.tree.map(lambda form: jnp.full(form.shape, 0.01, form.dtype), (params, batch))
    jax.block_until_ready(compiled(*given))
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        times.append(1e3 * (time.perf_counter() - start))
    return size, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--run", action="store_true", help="also time each chunk size")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    rows = (arguments.batch, arguments.seq)
    batch = {name: jax.ShapeDtypeStruct(rows, jnp.int32) for name in ("inputs", "targets")}
    batch["weights"] = jax.ShapeDtypeStruct(rows, jnp.float32)
    cfg = CausalLM.Config(
        vocab_size=arguments.vocab,
        dim=arguments.dim,
        decoder=Sequence.Config(layers=()),
        dtypes=ax.DTypes(compute="bfloat16"),
    )
    if arguments.tied:
        cfg = cfg.set(head=None)
    logits = 4 * arguments.batch * arguments.seq * arguments.vocab
    print(f"all logits in float32: {logits / MIB:,.0f} MiB\n")
    print("| chunk | temporaries | relative to None | ms |\n|---|---:|---:|---:|")
    chunks = [None, *(arguments.seq // parts for parts in (2, 4, 8, 16, 32) if arguments.seq >= parts)]
    found = {str(chunk): measured(cfg, chunk, batch, arguments.run) for chunk in chunks}
    for chunk, (size, ms) in found.items():
        shown = "" if ms is None else f"{ms:.1f}"
        print(f"| {chunk} | {size / MIB:,.0f} MiB | {size / found['None'][0]:.3f} | {shown} |")
    print(json.dumps({"measured": found, "logits": logits, "platform": jax.default_backend(), "jax": jax.__version__}))


if __name__ == "__main__":
    main()
