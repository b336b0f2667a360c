"""Time of plugin discovery with fifty plugins installed.

Creates temporary distributions, each with an entry point, a module and metadata of realistic size, and times
`Registry(...)` in fresh processes, after the metadata scan of `importlib.metadata`. Prints a JSON object on the last
line: `min_ms` and `median_ms` (limit 30), `cpu_ms` (median CPU time), `import_ms` (median time of importing only the
modules), `scan_ms` (median time of the metadata scan) and `plugins` (number of loaded plugins).
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODULE = '''"""What {name} offers."""

from axcore.plugin import AttentionKernelOffer, Feature, Recipe, hookimpl

axcore_api = 2


@hookimpl
def axcore_features(host):
    return [Feature("{name}", "bench_{number}.layers:use", "A feature."), Feature("{name}-b", "m:use_b", "Another.")]


@hookimpl
def axcore_attention_kernels():
    return [AttentionKernelOffer("{name}", "bench_{number}.kernel:Kernel", "A kernel.")]


@hookimpl
def axcore_recipes():
    return [Recipe("{name}", "bench_{number}.recipes:recipe", "A recipe.")]
'''

ROUND = """
import importlib.metadata, json, time
from axcore.plugin import Registry, State
began = time.perf_counter()
points = [*importlib.metadata.entry_points(group="axcore.plugins")]
scanned, busy = time.perf_counter(), time.process_time()
registry = Registry(points, {})
done, busy = time.perf_counter(), time.process_time() - busy
loaded = sum(plugin.state is State.LOADED for plugin in registry.plugins.values())
print(json.dumps([1e3 * (done - scanned), 1e3 * busy, 1e3 * (scanned - began), loaded]))
"""

IMPORTS = """
import importlib, json, sys, time
import axcore.plugin
began = time.perf_counter()
for number in range(int(sys.argv[1])):
    importlib.import_module(f"bench_{number}.plugin")
print(json.dumps(1e3 * (time.perf_counter() - began)))
"""


def install(site: Path, number: int) -> None:
    """Writes the files of one installed distribution."""
    name = f"bench-{number}"
    package, info = site / f"bench_{number}", site / f"bench_{number}-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(MODULE.format(name=name, number=number))
    needs = "".join(f"Requires-Dist: {needed}\n" for needed in ("axcore>=0.1", "jax>=0.11.1", "flax>=0.12.9"))
    readme = "A line of a README with a typical length, repeated to a typical file size.\n" * 100
    head = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{needs}"
    (info / "METADATA").write_text(f"{head}\n{readme}")
    (info / "entry_points.txt").write_text(f"[axcore.plugins]\n{name} = bench_{number}.plugin\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugins", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.plugins):
            install(Path(folder), number)
        compileall.compile_dir(folder, quiet=2)  # installers do this too
        environ = {**os.environ, "PYTHONPATH": folder}

        def measured(script: str, *args: str) -> Any:
            command = [sys.executable, "-c", script, *args]
            return json.loads(subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout)

        rounds = [measured(ROUND) for _ in range(arguments.rounds)]
        imports = [measured(IMPORTS, str(arguments.plugins)) for _ in range(arguments.rounds)]
    discovery, busy, scan, loaded = zip(*rounds, strict=True)
    figures = {
        "min_ms": round(min(discovery), 1),
        "median_ms": round(statistics.median(discovery), 1),
        "cpu_ms": round(statistics.median(busy), 1),
        "import_ms": round(statistics.median(imports), 1),
        "scan_ms": round(statistics.median(scan), 1),
        "plugins": min(loaded),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
