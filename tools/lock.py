"""Writes requirements.lock, requirements-oldest.lock and requirements-newest.lock with `uv pip compile`.

Run it as `make lock`. Inputs: requirements.in and the dependencies of every distribution in the repository.
The locks are valid for every platform and for Python 3.12 and later (`--universal`), and name no package index.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Each version cell: its lock file, extra requirements, extra flags.
CELLS: list[tuple[str, list[str], list[str]]] = [
    ("requirements.lock", ["jax==0.11.2", "flax==0.12.10"], []),
    # The declared lower bounds, currently jax 0.11.1 and flax 0.12.9.
    ("requirements-oldest.lock", [], ["--resolution", "lowest-direct"]),
    ("requirements-newest.lock", [], []),
]


def inputs() -> list[str]:
    """Requirement lines of the workspace, without its own distributions, which are installed in editable mode."""
    folders = [".", "plugins/*", "plugins_kernels/*", "recipes"]
    files = [file for folder in folders for file in sorted(ROOT.glob(f"{folder}/pyproject.toml"))]
    projects = [tomllib.loads(file.read_text())["project"] for file in files]
    ours = {project["name"] for project in projects}
    lines = [line for project in projects for line in project.get("dependencies", [])]
    return [line for line in lines if re.split(r"[^A-Za-z0-9._-]", line)[0] not in ours]


def main() -> int:
    uv = shutil.which("uv")
    if uv is None:
        print("make lock needs uv: pip install uv", file=sys.stderr)
        return 1
    for lock, pins, flags in CELLS:
        command = [uv, "pip", "compile", "--quiet", "--no-config", "--upgrade"]
        command += ["--universal", "--python-version", "3.12"]
        command += ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
        command += ["--custom-compile-command", "make lock", "--output-file", lock]
        command += [*flags, "requirements.in", "-"]
        done = subprocess.run(command, cwd=ROOT, input="\n".join(inputs() + pins), text=True)
        if done.returncode:
            return done.returncode
        print(f"wrote {lock}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
