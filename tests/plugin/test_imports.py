"""Importing axcore and discovering plugins imports few modules."""

import json
import subprocess
import sys

import pytest

HEAVY = {"jax", "jaxlib", "flax", "numpy", "optax", "orbax", "grain", "scipy", "matplotlib", "torch", "tensorflow"}


def loaded(code):
    """The modules that `code` imports in a new interpreter."""
    script = (
        f"import sys, json\nbefore = set(sys.modules)\n{code}\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("code", "most"),
    [
        ("import axcore; dir(axcore)", 20),
        ("import axcore; axcore.Config, axcore.select, axcore.REQUIRED", 60),
        ("import axcore.plugin", 200),
        ("import axcore.plugin; axcore.plugin.registry()", 220),
        ("from axcore import use, recipe", 200),
        ("import axcore.cli", 250),
    ],
)
def test_axcore_imports_few_modules_and_neither_jax_nor_flax(code, most):
    modules = loaded(code)
    assert not {name.partition(".")[0] for name in modules} & HEAVY
    assert len(modules) <= most
