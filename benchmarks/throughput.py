"""Training throughput of a Llama with FSDP over all local devices, on a packed batch of the trainer.

Prints a JSON object with tokens/s per device, and the MFU at a peak of 989 TFLOP/s, counting attention without the
causal mask. `--case` compares variants: each is a process with these arguments in addition to the others, and the JSON
objects of all cases are printed last, with the speed relative to the first. For example, FP8 in layers of Llama2-7B:

    python benchmarks/throughput.py --layers 8 --batch 4 --option xla_gpu_enable_triton_gemm=false --case "" \
        --case "--use fp8:where=decoder.layers.**" --case "--use fp8:scaling=delayed,where=decoder.layers.**"
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from device_trace import summary
from llama_pair import batch, documents_per_row, kernels_of

import axcore as ax
from axcore.nn import Attention, CausalLM, FeedForward, Linear, Normal, Repeat, TransformerLayer
from axcore.parallel import ByTag, Mesh
from axcore.plugin.features import use_text
from axcore.train import CrossEntropy, Learner
from axcore.train.step.program import program

PEAK = 989e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"dim": 4096, "layers": 32, "heads": 32, "kv-heads": 32, "hidden": 11008, "batch": 2, "seq": 4096}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="rows per device" * (name == "batch"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--unroll", type=int, help="layers per loop step; default: all")
    parser.add_argument("--chunk", type=int, help="tokens of each device whose logits exist at once")
    parser.add_argument(
        "--saved", help="comma-separated names of the values that the backward pass keeps; default: all"
    )
    parser.add_argument("--kernel", default="cudnn")
    parser.add_argument(
        "--use", action="append", default=[], help="a feature, such as fp8:scaling=delayed; may be repeated"
    )
    parser.add_argument("--option", action="append", default=[], help="a compiler option, NAME=VALUE; may be repeated")
    parser.add_argument("--trace", action="store_true", help="also print the device time by kind of kernel")
    parser.add_argument("--case", action="append", default=[], help="arguments of a variant; may be repeated")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for each case")
    parser.add_argument(
        "--cache", default=Path(__file__).parents[1] / ".cache" / "throughput", help="folder of compiled programs"
    )
    given = parser.parse_args()
    if given.case:
        compare(given.case, given.limit)
    else:
        print(json.dumps(measured(given)), flush=True)


def compare(cases: list[str], limit: float) -> None:
    """Runs this script for each case with the arguments of this process, except `--case`."""
    shared = argparse.ArgumentParser(allow_abbrev=False)
    shared.add_argument("--case", action="append")
    common = shared.parse_known_args()[1]
    found: list[dict[str, Any]] = []
    for case in cases:
        command = [sys.executable, __file__, *common, *shlex.split(case)]
        try:
            run = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit, text=True, check=True)
            result = json.loads(run.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            result = {"error": f"more than {limit:.0f} s"}
        except subprocess.CalledProcessError as error:
            result = {"error": f"exit status {error.returncode}"}
        found.append({"case": case} | result)
        print(found[-1], file=sys.stderr, flush=True)
    base = found[0].get("tokens_per_s_device")
    for result in found:
        speed = result.get("tokens_per_s_device")
        relative = {"relative_speed": round(speed / base, 4)} if speed and base else {}
        print(json.dumps(result | relative), flush=True)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """The figures of one case."""
    started = time.perf_counter()
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(given.cache)))
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=given.heads, num_kv_heads=given.kv_heads),
        ffn=FeedForward.Config(hidden_dim=given.hidden),
    )
    remat = ByTag(save=tuple(given.saved.split(","))) if given.saved else None
    decoder = Repeat.Config(num_layers=given.layers, layers=layer, unroll=given.unroll or given.layers, remat=remat)
    model = CausalLM.Config(
        vocab_size=32_000, dim=given.dim, dtypes=ax.DTypes(compute=jnp.bfloat16), decoder=decoder, head=Linear.Config()
    )
    model = ax.select(model, Linear).set(init=Normal(stddev=0.02))
    model = ax.pipe(model, ax.use("rope"), ax.use("kernels", order=(given.kernel,)), *map(use_text, given.use))
    layout = Mesh(shape={"data": 1, "fsdp": -1}).make()
    options = {name: json.loads(value) for name, _, value in (each.partition("=") for each in given.option)}
    made = program(model, Learner.Config(), layout, CrossEntropy.Config(chunk=given.chunk), compiler_options=options)
    data = batch(given.batch * jax.device_count(), given.seq)
    documents, kernels = documents_per_row(data), kernels_of(made, data)
    began = time.perf_counter()
    step = made.compile_train(data)
    compile_seconds = time.perf_counter() - began
    data = jax.device_put(data, jax.tree.map(lambda shape: shape.sharding, made.batch_shapes(data)))
    state = made.init(jnp.uint32(0))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    state, metrics = step(state, data)
    jax.block_until_ready(metrics)
    first_step_seconds = time.perf_counter() - started
    for _ in range(2):
        state, metrics = step(state, data)
    jax.block_until_ready(metrics)
    began = time.perf_counter()
    for _ in range(given.steps):
        state, metrics = step(state, data)
    jax.block_until_ready(metrics)
    seconds = (time.perf_counter() - began) / given.steps
    tokens = given.batch * given.seq / seconds
    flops = 6 * (parameters - 32_000 * given.dim) + 12 * given.layers * given.dim * given.seq
    memory = step.memory_analysis()
    trace = {}
    if given.trace:

        def again() -> object:
            nonlocal state
            state, metrics = step(state, data)
            return metrics

        trace = summary(again)
    figures = {
        "tokens_per_s_device": round(tokens),
        "mfu": round(tokens * flops / PEAK, 4),
        "step_ms": round(1e3 * seconds, 1),
        "compile_s": round(compile_seconds, 1),
        "first_step_s": round(first_step_seconds, 1),
        "kernel": kernels,
        "documents_per_row": round(documents, 2),
        "temp_gib": round(memory.temp_size_in_bytes / 2**30, 1),
        "arguments_gib": round(memory.argument_size_in_bytes / 2**30, 1),
        "loss": round(float(metrics["loss"]), 4),
        "devices": jax.device_count(),
        "card": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    arguments = {name: value for name, value in vars(given).items() if name not in ("case", "limit", "cache")}
    return arguments | figures | trace


if __name__ == "__main__":
    main()
