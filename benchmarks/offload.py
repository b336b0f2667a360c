"""Step time and peak device memory of a Llama with optimizer state and activations on the device or in host memory.

Prints one JSON object per variant: milliseconds per step (median), the peak of the allocator in GiB, and the arguments
and temporaries that the compiler reports. Each variant runs in its own process, since the allocator's peak never falls.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

VARIANTS = ("device", "host", "remat", "offload-activations")


def run(variant: str, layers: int, rows: int, seq: int, steps: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from llama_pair import batch

    import axcore as ax
    from axcore.nn import Attention, CausalLM, FeedForward, Linear, Normal, Repeat, TransformerLayer
    from axcore.parallel import ByTag, Mesh
    from axcore.train import CrossEntropy, Learner
    from axcore.train.step.program import program

    remat = {
        "device": ByTag(save=("query", "key", "value", "heads", "lse", "gate", "up")),
        "host": ByTag(save=("query", "key", "value", "heads", "lse", "gate", "up")),
        "remat": ByTag(save=("query", "key", "value", "heads", "lse")),
        "offload-activations": ByTag(save=("query", "key", "value", "heads", "lse"), offload=("gate", "up")),
    }[variant]
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=32, num_kv_heads=8), ffn=FeedForward.Config(hidden_dim=8192)
    )
    model = CausalLM.Config(
        vocab_size=32_000,
        dim=2048,
        dtypes=ax.DTypes(compute=jnp.bfloat16),
        decoder=Repeat.Config(num_layers=layers, layers=layer, remat=remat),
        head=Linear.Config(),
    )
    model = ax.select(model, Linear).set(init=Normal(stddev=0.02))
    model = ax.pipe(model, ax.use("rope"), ax.use("kernels", order=("cudnn",)))
    mesh = Mesh(shape={"data": 1}, optimizer_memory="host" if variant == "host" else "device")
    made = program(model, Learner.Config(), mesh.make(), CrossEntropy.Config())
    data = batch(rows, seq)
    compiled = made.lower_train(data).compile()
    memory = compiled.memory_analysis()
    data = jax.device_put(data, jax.tree.map(lambda shape: shape.sharding, made.batch_shapes(data)))
    state = made.init(jnp.uint32(0))
    times = []
    for _ in range(3 + steps):
        began = time.perf_counter()
        state, metrics = compiled(state, data)
        loss = float(metrics["loss"])
        times.append(time.perf_counter() - began)
    stats = jax.devices()[0].memory_stats() or {}
    print(
        json.dumps(
            {
                "variant": variant,
                "layers": layers,
                "loss": loss,
                "step_ms": round(1e3 * float(np.median(times[3:])), 1),
                "peak_gib": round(stats.get("peak_bytes_in_use", 0) / 2**30, 2),
                "arguments_gib": round(memory.argument_size_in_bytes / 2**30, 2),
                "temp_gib": round(memory.temp_size_in_bytes / 2**30, 2),
                "host_temp_gib": round(memory.host_temp_size_in_bytes / 2**30, 2),
                "host_arguments_gib": round(memory.host_argument_size_in_bytes / 2**30, 2),
            }
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, help="run only this one, in this process")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    if given.variant:
        run(given.variant, given.layers, given.rows, given.seq, given.steps)
        return
    for variant in VARIANTS:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--variant", variant], check=False)


if __name__ == "__main__":
    main()
