"""Peak host memory of importing a checkpoint, without the final arrays. The limit is the largest file plus 10%.

Writes a sharded Llama checkpoint, imports it on the CPU, where the final arrays are in host memory too, and reads the
peak from /proc (Linux). Prints a JSON object on the last line.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import pathlib
import tempfile
import time

import jax
import numpy as np

from axcore.module import abstract
from axcore.train.checkpoint.model_folder import flat
from axcore_hf import exporting, importing
from axcore_hf.families import by_type
from axcore_hf.fields import Fields
from axcore_hf.sources import Safetensors


def resident(kind: str) -> int:
    """Resident bytes of this process: `VmRSS` now, `VmHWM` the peak since it was last cleared."""
    (line,) = (line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return 1024 * int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--shard-mib", type=float, default=100)
    arguments = parser.parse_args()
    raw = {
        "model_type": "llama",
        "hidden_size": arguments.dim,
        "intermediate_size": 3 * arguments.dim,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": 12,
        "vocab_size": 32_000,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    family = by_type("llama")
    cfg = family.read_config(Fields(raw))
    params = flat(abstract(cfg)[1])
    size = sum(form.size * form.dtype.itemsize for form in params.values())
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch, "checkpoint")
        arrays = {path: np.full(form.shape, 0.01, form.dtype) for path, form in params.items()}
        exporting.write(folder, family, cfg, arrays, raw, shard_bytes=int(arguments.shard_mib * 2**20))
        del arrays
        largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
        jax.block_until_ready(importing.load(family, cfg, Safetensors(folder), cfg, params, {}))  # compiles
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # otherwise, reuse of freed memory would hide allocations
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before, start = resident("VmRSS"), time.perf_counter()
        loaded = jax.block_until_ready(importing.load(family, cfg, Safetensors(folder), cfg, params, {}))
        seconds = time.perf_counter() - start
        staged = resident("VmHWM") - before - size
        del loaded
    print(
        json.dumps(
            {
                "checkpoint_mib": round(size / 2**20),
                "largest_file_mib": round(largest / 2**20),
                "staged_mib": round(staged / 2**20),
                "of_limit": round(staged / (1.1 * largest), 3),
                "seconds": round(seconds, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
