"""Memory and time of the loss and its gradients, by `CrossEntropy.Config.chunk`: the tokens whose logits exist at once.

Compiles a model without layers, so that almost only the loss takes memory, or with --layers one with the layers of
Llama 3.2 1B, and times it with --run. With --target it compiles for an accelerator that need not be available. Prints
a table of the temporary buffers in the compiled program, and a JSON object on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.aot.targets import Target
from axcore.module import abstract
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, Sequence, TransformerLayer
from axcore.train import CrossEntropy

MIB = 2**20


class Measured(NamedTuple):
    """Of one gradient step: bytes of temporary buffers in the compiled program, the median and all milliseconds."""

    temporaries: int
    ms: float | None
    times: tuple[float, ...]


def measured(cfg: CausalLM.Config, chunk: int | None, batch: Any, target: Target | None, run: bool) -> Measured:
    """Compiles the gradient step and times it if `run` is set."""
    fn, params, _ = abstract(cfg)
    objective = CrossEntropy.Config(z_loss=1e-4, chunk=chunk).build()

    def value(params: Any, batch: Any) -> jax.Array:
        return objective.value(fn, params, {}, batch)

    forms = (params, batch)
    if target is not None:
        sharding = jax.sharding.SingleDeviceSharding(target.devices()[0])
        forms = jax.tree.map(lambda form: jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=sharding), forms)
    compiled = jax.jit(jax.value_and_grad(value)).lower(*forms).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    size, times = memory.temp_size_in_bytes, []
    if not run:
        return Measured(size, None, ())
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(params)) + len(batch)))

    def random(form: jax.ShapeDtypeStruct) -> jax.Array:
        if form.dtype == jnp.int32:
            return jax.random.randint(next(keys), form.shape, 0, cfg.vocab_size, form.dtype)
        return 0.02 * jax.random.normal(next(keys), form.shape, form.dtype)

    given = jax.tree.map(random, params), jax.tree.map(random, batch) | {"weights": jnp.ones_like(batch["weights"])}
    for _ in range(3):
        jax.block_until_ready(compiled(*given))
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        times.append(1e3 * (time.perf_counter() - start))
    return Measured(size, statistics.median(times), tuple(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--chunks", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    parser.add_argument("--layers", type=int, default=0, help="layers of Llama 3.2 1B; 16: the whole model")
    parser.add_argument("--kernel", default="cudnn", help="attention kernel of the layers")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--target", type=Target.of, help="compile for this accelerator, such as gpu-h100-1")
    parser.add_argument("--run", action="store_true", help="also time each chunk size")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    rows = (arguments.batch, arguments.seq)
    batch = {name: jax.ShapeDtypeStruct(rows, jnp.int32) for name in ("inputs", "targets")}
    batch["weights"] = jax.ShapeDtypeStruct(rows, jnp.float32)
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=32, num_kv_heads=8), ffn=FeedForward.Config(hidden_dim=8192)
    )
    cfg = CausalLM.Config(
        vocab_size=arguments.vocab,
        dim=arguments.dim,
        decoder=Repeat.Config(num_layers=arguments.layers, layers=layer)
        if arguments.layers
        else Sequence.Config(layers=()),
        dtypes=ax.DTypes(compute="bfloat16"),
    )
    if arguments.layers:
        cfg = ax.pipe(cfg, ax.use("rope"), ax.use("kernels", order=(arguments.kernel,)))
    if arguments.tied:
        cfg = cfg.set(head=None)
    logits = 4 * arguments.batch * arguments.seq * arguments.vocab
    print(f"all logits in float32: {logits / MIB:,.0f} MiB\n")
    print("| chunk | temporaries | relative to None | ms | relative to None |\n|---|---:|---:|---:|---:|")
    found: dict[str, Measured] = {}
    for chunk in (None, *arguments.chunks):
        each = found[str(chunk)] = measured(cfg, chunk, batch, arguments.target, arguments.run)
        whole = found["None"]
        shown = f"{each.ms:.2f} | {each.ms / whole.ms:.3f}" if each.ms and whole.ms else " | "
        ratio = each.temporaries / whole.temporaries
        print(f"| {chunk} | {each.temporaries / MIB:,.0f} MiB | {ratio:.3f} | {shown} |", flush=True)
    figures = {name: each._asdict() for name, each in found.items()}
    platform = arguments.target.accelerator.text if arguments.target else jax.devices()[0].device_kind
    print(json.dumps({"measured": figures, "logits": logits, "platform": platform, "jax": jax.__version__}))


if __name__ == "__main__":
    main()
