"""An engine under load: throughput and latency at batch 1 and with 64 concurrent requests.

The model has the shape of Llama 2 7B and random bfloat16 weights. Requests have 512 tokens in and 256 out, greedy. Each
case prints a line of JSON: the figures of `axcore.infer.load_test`, the seconds until the first token of a fresh
engine, and the share of the bound that the copy bandwidth of the card, measured in the same call, sets for one row.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from copy_bandwidth import copy_bandwidth
from device_trace import summary

import axcore as ax
from axcore.infer import Engine, Request, SamplingOptions
from axcore.infer.execution.programs import Programs
from axcore.infer.execution.runner import Runner
from axcore.infer.load_test import Load, measure
from axcore.nn import Attention, CausalLM, FeedForward, KVCache, Linear, Repeat, TransformerLayer
from axcore.parallel import Mesh
from axcore.plugin import KVCacheOffer, offered, use_text

BFLOAT16 = jnp.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"dim": 4096, "layers": 32, "heads": 32, "hidden": 11008, "vocab": 32_000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--burst-tokens", type=int, help="prompt tokens of a step during a burst")
    for name, default in {"input": 512, "output": 256, "requests": 256, "step-tokens": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64], help="concurrent requests of each case")
    parser.add_argument("--cache", action="append", help="a KV cache, such as paged-kv:page_size=64; repeatable")
    parser.add_argument("--use", action="append", default=[], help="a feature or other offer; repeatable")
    parser.add_argument("--stored", action="store_true", help="store weights in the number format of --use")
    parser.add_argument("--tensor", type=int, default=1, help="GPUs that share heads and hidden features")
    parser.add_argument(
        "--idle", action="store_true", help="also measure how long no kernel runs while all rows decode"
    )
    parser.add_argument("--host", action="store_true", help="also measure the host's time for the parts of a step")
    given = parser.parse_args()
    model = decoding_model(given)
    bound = given.tensor * copy_bandwidth() / weight_bytes(model)
    facts = {"card": jax.devices()[0].device_kind, "jax": jax.__version__, "bound_tokens_per_s": round(bound, 1)}
    lines = []
    for cache in given.cache or ["contiguous"]:
        for rows in given.rows:
            try:
                found = case(model, offered(KVCacheOffer, cache), rows, given)
                found["share_of_bound"] = found["decode_tokens_per_s"] / bound
            except Exception as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}
            lines.append(json.dumps({"cache": cache, "rows": rows, **shown, **facts}))
            print(lines[-1], flush=True)
    print("\n".join(["results:", *lines]), flush=True)


def decoding_model(given: Any) -> ax.Layer:
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=given.heads), ffn=FeedForward.Config(hidden_dim=given.hidden)
    )
    cfg = CausalLM.Config(
        vocab_size=given.vocab,
        dim=given.dim,
        dtypes=ax.DTypes(param=BFLOAT16, compute=BFLOAT16),
        decoder=Repeat.Config(num_layers=given.layers, layers=layer),
        head=Linear.Config(),
    )
    cfg = ax.pipe(cfg, ax.use("rope"), *map(use_text, given.use))
    if given.stored:
        cfg = ax.select(cfg, lambda _, node: hasattr(node, "stored")).set(stored=True)
    model: ax.Layer = cfg.build(rngs=ax.Rngs(0))
    return model


def case(model: ax.Layer, cache: KVCache.Config, rows: int, given: Any) -> dict[str, Any]:
    cfg = Engine.Config(
        cache=cache,
        max_rows=rows,
        max_len=given.input + given.output,
        step_tokens=given.step_tokens,
        burst_tokens=given.burst_tokens if rows > 1 else None,
    )
    began = time.perf_counter()
    layout = Mesh(shape={"tensor": given.tensor}).make(jax.devices()[: given.tensor]) if given.tensor > 1 else None
    with cfg.build(model, layout=layout) as engine:
        engine.warm_up(("greedy",))
        measure(engine, Load(1, 1, given.input, 2))
        start = time.perf_counter() - began
        compiled = engine.stats.compiled
        requests = 5 if rows == 1 else given.requests
        figures = measure(engine, Load(requests, rows, given.input, given.output), seed=1)
        late = engine.stats.compiled - compiled
        more = idle(engine, rows, given) if given.idle else {}
        more |= host_times(engine, rows, given) if given.host else {}
    return {"start_s": start, "compiled": compiled, "compiled_late": late, **figures._asdict(), **more}


def host_times(engine: Engine, rows: int, given: Any) -> dict[str, float]:
    """The median milliseconds of the parts of a step on the host: to start it, of which the calls of the model and of
    the sampler, and to read its tokens, which waits for the device."""
    parts = [(Runner, "start"), (Programs, "logits"), (Programs, "sampled"), (Runner, "read")]
    with contextlib.ExitStack() as stack:
        times = {name: stack.enter_context(timed(owner, name)) for owner, name in parts}
        measure(engine, Load(rows, rows, given.input, given.output), seed=2)
    return {f"host_{name}_ms": 1e3 * statistics.median(each) for name, each in times.items()}


@contextlib.contextmanager
def timed(owner: type, name: str) -> Iterator[list[float]]:
    """The seconds of each call of a method."""
    method, times = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = method(*args, **kwargs)
        times.append(time.perf_counter() - began)
        return found

    setattr(owner, name, call)
    try:
        yield times
    finally:
        setattr(owner, name, method)


def idle(engine: Engine, rows: int, given: Any) -> dict[str, float]:
    """The share of the time in which no kernel runs while all rows decode. Their prompts are computed before, so that
    the trace has steps of decoding only. Without a trace, graphs of kernels leave less time between them."""
    prompts = [tuple(range(row, row + given.input)) for row in range(rows)]

    def run(count: int) -> None:
        options = SamplingOptions(temperature=0.0, max_tokens=count, ignore_eos=True)
        engine.generate([Request(prompt, options) for prompt in prompts])

    run(1)
    count = given.output // 4
    traced = summary(functools.partial(run, count), 1)
    return {"traced_step_ms": traced["step"] / count, "idle_share": traced["idle"] / traced["step"]}


def weight_bytes(model: ax.Layer) -> int:
    """Bytes of the weights that every token reads: all but the embedding."""
    _, params, _ = ax.functional(model)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(leaf.nbytes for path, leaf in leaves if "embedding" not in jax.tree_util.keystr(path))


if __name__ == "__main__":
    main()
