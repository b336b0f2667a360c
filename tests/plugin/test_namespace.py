"""`import axcore as ax` provides exactly the public names and submodules, and imports each on first use."""

import ast
import importlib
import inspect
import pathlib
import subprocess
import sys

import pytest

import axcore as ax

ROOT = pathlib.Path(ax.__file__).parent
SUBMODULES = ("aot", "config", "infer", "module", "nn", "numerics", "parallel", "plugin", "runtime", "testing", "train")
PACKAGES = [*(f"axcore.{name}" for name in SUBMODULES), "axcore.train.data"]


@pytest.mark.parametrize("use", ["nn.Linear", "train.Trainer", "config.walk", "tree", "Trainer", "fit", "aot.explain"])
def test_public_names_are_imported_on_first_use(use):
    code = f"import sys, axcore as ax\nassert not {{'jax', 'flax'}} & set(sys.modules)\nax.{use}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_dir_lists_exactly_the_public_names():
    assert dir(ax) == sorted(ax.__all__)
    assert {name for name in ax.__all__ if inspect.ismodule(getattr(ax, name))} == set(SUBMODULES)
    for name in ("Confg", "importlib", "Any", "annotations"):
        assert name not in dir(ax)
    with pytest.raises(AttributeError, match="no attribute 'Confg'"):
        _ = ax.Confg


def test_type_checkers_see_the_same_names():
    (block,) = [node for node in ast.parse((ROOT / "__init__.py").read_text()).body if isinstance(node, ast.If)][:1]
    imported = {each.asname or each.name: node.module for node in block.body for each in node.names}
    assert set(imported) | {"__version__"} == set(ax.__all__)
    for name, home in imported.items():
        assert getattr(ax, name) is getattr(importlib.import_module(home), name), name


@pytest.mark.parametrize("package", PACKAGES)
def test_dir_of_a_package_equals_its_all(package):
    module = importlib.import_module(package)
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_public_classes_have_unique_names():
    homes = {}
    for package in ["axcore", *PACKAGES]:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, type):
                homes.setdefault(name, set()).add(value)
    assert {name: classes for name, classes in homes.items() if len(classes) > 1} == {}
