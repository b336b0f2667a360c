"""Training and inference over several GPUs of one host.

Prints a line of JSON for each case, and all of them again at the end. The cases, by group:

- `7b`: Llama 2 7B with FSDP on packed rows of 4,096 tokens, in bfloat16 and FP8, for each of `--rows`; and a PyTorch
  program for the same model (`--peer`), for each of `--peer-options`. Compare the best of each;
- `weak`: Llama 1.1B on 1, 2, 4, ... GPUs with 8 rows on each. `relative_speed` is the efficiency against one;
- `strategies`: FSDP, FSDP x tensor, pipelines of 4 stages, context (rows of 32,768 tokens) and FSDP x expert (8
  experts): tokens/s, exposed communication, and the largest difference of the losses to those of one GPU;
- `checkpoint`: a checkpoint of 7B, restored on half and a quarter of the GPUs: seconds, and the next loss of each;
- `engine`: Llama 2 7B on up to 4 GPUs by tensor parallelism, at batch 1 and 64.

    python benchmarks/several_gpus.py --gpus 8 --estimate --limit 7200    # before: needs no GPU, but axcore[aot-cuda]
    python benchmarks/several_gpus.py --gpus 8 --peer torch_fsdp_probe.py

Each case is a process of its own. No case starts after `--limit` seconds; what was not run is printed, and `--groups`
runs it later. Keep NVLink multicast off where it is not available (`NCCL_NVLS_ENABLE=0`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GROUPS = ("7b", "weak", "strategies", "checkpoint", "engine")
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4, help="GPUs of this host, a power of two")
    parser.add_argument("--groups", nargs="+", default=GROUPS, choices=GROUPS, help="which cases to run (default: all)")
    parser.add_argument("--rows", type=int, nargs="+", default=[4], help="rows on each GPU to try for 7B")
    parser.add_argument("--peer", help="a script for torchrun with the options --batch ROWS and --ac none|sel|full")
    parser.add_argument("--peer-options", nargs="+", default=["--batch 4 --ac sel"], help="the runs of --peer")
    parser.add_argument("--steps", type=int, default=20, help="training steps of a case, of which 3 are not timed")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds after which no case starts")
    parser.add_argument("--estimate", action="store_true", help="print estimates of `axcore aot` for training instead")
    parser.add_argument("--tiny", action="store_true", help="small models on CPU devices, to try the script")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tiny:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={given.gpus}"
    if given.case:
        print(json.dumps(run(given.case, given)), flush=True)
    else:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SEVERAL_GPUS_FOLDER"] = folder
            run_all(given)


def run_all(given: argparse.Namespace) -> None:
    """Runs each case in a process, until the time is over."""
    began, lines = time.perf_counter(), []
    losses: dict[str, list[float]] = {}
    speeds: dict[str, float] = {}
    known = cases(given.gpus, given.rows)
    for name, command in commands(given):
        if time.perf_counter() - began > given.limit:
            lines.append(json.dumps({"case": name, "not_run": f"more than {given.limit:.0f} s were over"}))
            continue
        left = max(60.0, given.limit + 40 - (time.perf_counter() - began))
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left)
            shown = done.stdout.partition("results:")[0]  # after which serving.py repeats its lines
            found = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
            said = [line for line in done.stderr.splitlines() if not line.startswith("    @")]  # frames of an abort
            found = found or [{"error": said[-2:]}]
        except subprocess.TimeoutExpired:
            found = [{"error": f"more than {left:.0f} s"}]
        for each in found:
            if own := each.pop("losses", []):
                losses[name], speeds[name] = own, each["tokens_per_s_gpu"]
                each["last_loss"] = own[-1]
            baseline = known[name].baseline if name in known else None
            if own and baseline in losses:
                each["relative_speed"] = round(speeds[name] / speeds[baseline], 4)
                if known[name].rows == known[baseline].rows:
                    pairs = zip(own, losses[baseline], strict=True)
                    each["largest_difference_of_losses"] = max(abs(one / other - 1) for one, other in pairs)
            lines.append(json.dumps({"case": name} | each))
            print(lines[-1], flush=True)
    print("\n".join(["results:", *lines]), flush=True)


def commands(given: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """The name and the command of each case."""
    shared = [sys.executable, __file__, "--gpus", str(given.gpus), "--steps", str(given.steps)]
    shared += ["--rows", *map(str, given.rows), *["--estimate"] * given.estimate, *["--tiny"] * given.tiny]
    for name in cases(given.gpus, given.rows):
        if name.partition(" ")[0] in given.groups and not (given.estimate and name.startswith("checkpoint")):
            yield name, [*shared, "--case", name]
    if given.estimate:
        return
    if "7b" in given.groups and given.peer:
        for options in given.peer_options:
            peer = ["-m", "torch.distributed.run", f"--nproc-per-node={given.gpus}", given.peer, *options.split()]
            yield f"7b PyTorch {options}", [sys.executable, *peer]
    if "engine" in given.groups:
        engine = [sys.executable, str(HERE / "serving.py"), "--tensor", str(min(4, given.gpus))]
        engine += ["--cache", "paged-kv:page_size=16"]
        kernels = ["--use", "cudnn", "--use", "paged-attention", "--use", "gemv"]
        small = ["--dim", "64", "--heads", "4", "--hidden", "128", "--layers", "2", "--vocab", "512"]
        small += ["--input", "16", "--output", "8", "--requests", "4", "--rows", "1", "4"]
        yield "engine", engine + (small if given.tiny else kernels)


def cases(gpus: int, rows: list[int]) -> dict[str, Any]:
    """The training runs, by name. The first word is the group."""
    from gpu_cases import Case

    found: dict[str, Case] = {}
    for each in rows:
        found[f"7b fsdp, {each} rows"] = Case("llama2-7b", gpus, each * gpus, features={"fsdp": {}})
        found[f"7b fsdp, {each} rows, FP8"] = Case(
            "llama2-7b", gpus, each * gpus, features={"fsdp": {}, "fp8": {}}, baseline=f"7b fsdp, {each} rows"
        )
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= gpus]
    for size in sizes:
        found[f"weak {size}"] = Case("llama-1b", size, 8 * size, baseline="weak 1", trace=size == gpus)
    half, stages = gpus // 2, min(4, gpus)
    dense = {
        "data": {"data": {"size": gpus}},
        "fsdp": {"fsdp": {"size": gpus}},
        "fsdp x tensor": {"fsdp": {"size": half}, "tensor": {"size": 2}},
        f"pipeline {stages}, 1F1B": {"data": {"size": gpus // stages}, "pipeline": {"size": stages}},
        f"pipeline {stages}, interleaved": {
            "data": {"size": gpus // stages},
            "pipeline": {"size": stages, "chunks": 2},
        },
        f"pipeline {stages}, zero bubble": {
            "data": {"size": gpus // stages},
            "pipeline": {"size": stages, "schedule": "zero-bubble"},
        },
    }
    found["strategies dense, one GPU"] = Case("llama-1b", 1, 8, trace=False)
    for name, features in dense.items():
        microbatches = 8 // features["data"]["size"] if "pipeline" in features else 1
        found[f"strategies dense, {name}"] = Case(
            "llama-1b", gpus, 8, features=features, microbatches=microbatches, baseline="strategies dense, one GPU"
        )
    found["strategies 32k, one GPU"] = Case("llama-1b", 1, 1, 32_768, trace=False)
    found["strategies 32k, context"] = Case(
        "llama-1b", gpus, 1, 32_768, {"context": {"size": gpus}}, baseline="strategies 32k, one GPU"
    )
    experts: dict[str, dict[str, Any]] = {"moe": {"num_experts": 8}}
    found["strategies mixture, one GPU"] = Case("llama-1b", 1, 8, features=experts, layers=4, trace=False)
    found["strategies mixture, fsdp x expert"] = Case(
        "llama-1b",
        gpus,
        8,
        features=experts | {"fsdp": {"size": half}, "expert": {"size": 2}},
        layers=4,
        baseline="strategies mixture, one GPU",
    )
    for size in (gpus, gpus // 2, gpus // 4):
        if size:
            found[f"checkpoint on {size}"] = Case("llama2-7b", size, gpus, features={"fsdp": {}})
    return found


def run(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of a training case, in this process."""
    import gpu_cases

    case = cases(given.gpus, given.rows)[name]
    if given.estimate:
        return gpu_cases.estimated(case)
    if name.startswith("checkpoint"):
        return gpu_cases.checkpointed(case, Path(os.environ["SEVERAL_GPUS_FOLDER"]), tiny=given.tiny)
    return gpu_cases.measured(case, given.steps, tiny=given.tiny)


if __name__ == "__main__":
    main()
