"""Ways to add a feature to every variant. Each edits sources, so that its cost can be counted.

`BY_USE` is the measured one. The others are controls: they do by hand in each module what `use` does in one place, and
the measurement must report their higher order.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from axcore.config import ConfigError
from axcore_loc.workspace import GRID, Sources, recipe_names


@dataclasses.dataclass(frozen=True)
class Integration:
    """An edit of sources that adds a feature to every pair of a model and an attention.

    Attributes:
        edit: (sources, the call of `axcore.use` as source) -> sources.
        expected: the expected order of its lines; None for the measured integration.
    """

    name: str
    edit: Callable[[Sources, str], Sources]
    expected: str | None = None


def use_call(feature: str, options: Mapping[str, Any]) -> str:
    """`ax.use("rope", theta=500000.0)`, as source.

    Raises:
        ConfigError: an option cannot be written as source.
    """
    for name, value in options.items():
        try:
            written = ast.literal_eval(repr(value)) == value
        except (ValueError, SyntaxError):
            written = False
        if not written:
            raise ConfigError(f"option {name}={value!r} of {feature} cannot be written as source. Leave it out.")
    return f"ax.use({', '.join([repr(feature), *(f'{name}={value!r}' for name, value in options.items())])})"


def _by_use(sources: Sources, call: str) -> Sources:
    """One line, where the variants are composed."""
    return {**sources, GRID: _returning(sources[GRID], "recipe", (f"return {call}({{value}})",))}


def _per_model(sources: Sources, call: str) -> Sources:
    """A line in the recipe of each model."""
    return _edited(sources, "models", "recipe", [f"return {call}({{value}})"])


def _per_slot(sources: Sources, call: str) -> Sources:
    """A line in each attention."""
    return _edited(sources, "attentions", "attention", [f"return {call}({{value}})"])


def _per_pair(sources: Sources, call: str) -> Sources:
    """In the recipe of each model, a case for each attention."""
    attentions = sorted({attention for _, attention in recipe_names(sources)})
    ladder = ["cfg = {value}"]
    for name in attentions:
        ladder += [f"if attention == {name}_attention.attention():", f"    cfg = {call}(cfg)"]
    imported = [f"from ..attentions import {name} as {name}_attention" for name in attentions]
    return _edited(sources, "models", "recipe", [*ladder, "return cfg"], imported)


BY_USE = Integration("axcore.use", _by_use)
CONTROLS = (
    Integration("by hand in each model", _per_model, "O(N)"),
    Integration("by hand in each attention", _per_slot, "O(M)"),
    Integration("by hand in each model, for each attention", _per_pair, "O(NM)"),
)


def _edited(
    sources: Sources, kind: str, function: str, lines: list[str], imported: Sequence[str] = ()
) -> dict[str, str]:
    """The sources with another `return` of one function in every variant of a kind."""
    variants = {path for path in sources if path.startswith(f"{kind}/") and not path.endswith("__init__.py")}
    return {
        path: _with_import(_returning(source, function, tuple(lines)), *imported) if path in variants else source
        for path, source in sources.items()
    }


@functools.cache  # a grid of variants edits the same modules again and again
def _returning(source: str, function: str, lines: tuple[str, ...]) -> str:
    """The source with other lines in place of the `return` that ends a function; `{value}` is what it returned."""
    (found,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function)
    last = found.body[-1]
    assert isinstance(last, ast.Return) and last.value is not None and last.end_lineno is not None
    value = ast.get_source_segment(source, last.value)
    text = source.splitlines()
    text[last.lineno - 1 : last.end_lineno] = [f"    {line.replace('{value}', value or '')}" for line in lines]
    return "\n".join(text) + "\n"


@functools.cache
def _with_import(source: str, *more: str) -> str:
    """The source with `import axcore as ax` and more imports after its docstring, unless it already has them."""
    text = source.splitlines()
    added = [line for line in ("import axcore as ax", *more) if line not in text]
    first = ast.parse(source).body[1].lineno - 1
    return "\n".join([*text[:first], *added, *text[first:]]) + "\n"
