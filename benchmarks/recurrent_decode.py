"""A decoding step of a small Mamba-2 model on CPU, of several versions of axcore in one process.

Each version saves its compiled program, with the packages of that version on `PYTHONPATH`. The comparison loads them
and alternates between them: 30 rounds of 200 tokens each.

    python benchmarks/recurrent_decode.py save before --rows 8     # in a checkout of the earlier version
    python benchmarks/recurrent_decode.py save after --rows 8
    python benchmarks/recurrent_decode.py compare before after
"""

from __future__ import annotations

import argparse
import pathlib
import pickle
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.nn import ContiguousCache

ROUNDS, TOKENS = 30, 200
Program = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    saving = commands.add_parser("save", help="compiles the step of this version")
    saving.add_argument("file", type=pathlib.Path)
    saving.add_argument("--rows", type=int, default=8)
    saving.add_argument("--attention-every", type=int, help="keeps the attention of every n-th layer")
    commands.add_parser("compare", help="times saved steps").add_argument("files", type=pathlib.Path, nargs="+")
    given = parser.parse_args()
    if given.command == "save":
        given.file.write_bytes(pickle.dumps(compiled(given.rows, given.attention_every)))
        return
    programs = {str(file): pickle.loads(file.read_bytes()) for file in given.files}
    compare({name: loaded(program) for name, program in programs.items()})


def compiled(rows: int, attention_every: int | None) -> Program:
    """The compiled step with its arguments: parameters, state, the last tokens and their positions."""
    mamba = ax.use("mamba2", state_dim=16, head_dim=32, attention_every=attention_every)
    model = mamba(ax.recipe("quickstart")).model.build(rngs=ax.Rngs(0))
    decoder, params, state = Decoder.of(model, cache=ContiguousCache.Config(), batch_size=rows, max_len=256)
    (params, of_params), (state, of_state) = jax.tree.flatten(params), jax.tree.flatten(state)

    def step(params: Any, state: Any, ids: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        tokens = Step(ids, start=start)
        logits, new = decoder(jax.tree.unflatten(of_params, params), jax.tree.unflatten(of_state, state), tokens)
        return jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32), start + 1, jax.tree.leaves(new)

    ids, start = jnp.ones((rows, 1), jnp.int32), jnp.zeros((rows,), jnp.int32)
    program = jax.jit(step, donate_argnums=1).lower(params, state, ids, start).compile()
    arguments = jax.device_get((params, state, ids, start))
    return {"program": serialize_executable.serialize(program), "arguments": arguments}


def loaded(saved: Program) -> tuple[Any, Any]:
    return serialize_executable.deserialize_and_load(*saved["program"]), saved["arguments"]


def decode(program: Any, arguments: Any) -> tuple[float, np.ndarray]:
    """Decodes greedily. Returns the milliseconds of a step, and the tokens [rows, TOKENS]."""
    params, state, ids, start = jax.tree.map(lambda array: jnp.array(array, copy=True), arguments)
    jax.block_until_ready(state)
    began, found = time.perf_counter(), []
    for _ in range(TOKENS):
        ids, start, state = program(params, state, ids, start)
        found.append(ids)
    jax.block_until_ready(ids)
    return (time.perf_counter() - began) / TOKENS * 1e3, np.concatenate(found, axis=1)


def compare(programs: dict[str, tuple[Any, Any]]) -> None:
    first = next(iter(programs))
    times: dict[str, list[float]] = {name: [] for name in programs}
    wanted = decode(*programs[first])[1]
    for name, program in programs.items():
        print(f"{name}: {np.mean(decode(*program)[1] == wanted):.0%} of the tokens are those of {first}")
    for _ in range(ROUNDS):
        for name, program in programs.items():
            times[name].append(decode(*program)[0])
    for name, found in times.items():
        ratio = statistics.median(now / before for now, before in zip(found, times[first], strict=True))
        print(f"{name}: median {statistics.median(found):.3f} ms, least {min(found):.3f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
