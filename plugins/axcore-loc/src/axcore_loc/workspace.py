"""The variants as a separate distribution, whose sources can be edited, counted and used as recipes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from axcore.config import ConfigError
from axcore.plugin import registry

PACKAGE = "loc_variants"
VARIANTS = Path(__file__).parent / "variants"

Sources = Mapping[str, str]
"""Path below the package -> source."""

GRID = "grid.py"
"""The module that combines models with attentions. Each pair is one of its recipes."""

_GRID = '''"""Every model with every attention."""

import functools
import importlib
import itertools
import types

import axcore as ax
from axcore.train import Trainer

MODELS = {models}
ATTENTIONS = {attentions}


def recipe(model: str, attention: str) -> Trainer.Config:
    slot = importlib.import_module(f".attentions.{{attention}}", __package__).attention()
    cfg: Trainer.Config = importlib.import_module(f".models.{{model}}", __package__).recipe(slot)
    return cfg


recipes = types.SimpleNamespace()
for pair in itertools.product(MODELS, ATTENTIONS):
    setattr(recipes, "__".join(pair), functools.partial(recipe, *pair))
'''

_PLUGIN = '''"""Every pair of a model and an attention, as a recipe."""

from axcore.plugin import Recipe, hookimpl


@hookimpl
def axcore_recipes() -> list[Recipe]:
    return [
        Recipe(f"{{model}}-{{attention}}", f"{package}.grid:recipes.{{model}}__{{attention}}", "A variant.")
        for model in {models}
        for attention in {attentions}
    ]
'''


def names(kind: str, count: int | None = None) -> list[str]:
    """The first `count` variants of a kind, `models` or `attentions`, simplest first.

    Raises:
        ConfigError: there are fewer variants.
    """
    plainest = {"models": "small", "attentions": "mha"}[kind]
    found = sorted(path.stem for path in (VARIANTS / kind).glob("*.py") if path.stem != "__init__")
    found.sort(key=lambda name: name != plainest)
    if count is not None and not 0 < count <= len(found):
        raise ConfigError(f"the number of {kind} must be from 1 to {len(found)}, not {count}")
    return found[:count]


def sources(models: Sequence[str], attentions: Sequence[str]) -> Sources:
    """The sources of the given models and attentions, before any feature is added."""
    copied = ["__init__.py", "training.py", "models/__init__.py", "attentions/__init__.py"]
    copied += [f"models/{name}.py" for name in models] + [f"attentions/{name}.py" for name in attentions]
    listed = {"models": tuple(models), "attentions": tuple(attentions)}
    return {
        **{path: _read(path) for path in copied},
        GRID: _GRID.format(**listed),
        "plugin.py": _PLUGIN.format(package=PACKAGE, **listed),
    }


@functools.cache
def _read(path: str) -> str:
    return (VARIANTS / path).read_text()


def owner(path: str) -> str:
    """The owner of a path: `recipe` for the module that composes the variants, `models` for the variants."""
    return "recipe" if path in (GRID, "plugin.py") else "models"


def recipe_names(each: Sources) -> list[tuple[str, str]]:
    """The (model, attention) pairs of a tree of sources."""
    models, attentions = (
        [Path(path).stem for path in each if path.startswith(f"{kind}/") and not path.endswith("__init__.py")]
        for kind in ("models", "attentions")
    )
    return [(model, attention) for model in models for attention in attentions]


@contextlib.contextmanager
def installed(each: Sources) -> Iterator[None]:
    """Installs the sources as a plugin while active, in which each pair is the recipe `MODEL-ATTENTION`."""
    with tempfile.TemporaryDirectory(prefix="axcore-loc-") as folder:
        for path, source in each.items():
            file = Path(folder, PACKAGE, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        metadata = Path(folder, f"{PACKAGE}-1.0.dist-info")
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[axcore.plugins]\n{PACKAGE} = {PACKAGE}.plugin\n")
        sys.path.insert(0, folder)
        _forget()
        try:
            yield
        finally:
            sys.path.remove(folder)
            _forget()


def _forget() -> None:
    """Clears cached modules and the registry, so that they are read again from the current path."""
    for module in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
        del sys.modules[module]
    importlib.invalidate_caches()
    registry.cache_clear()
