"""The arguments that every command shares which takes a recipe, and what they compose."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class _InOrder(argparse.Action):
    """Collects `--use`, `--target` and `--set` in one list: later edits see what earlier ones did."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.edits = [*getattr(namespace, "edits", ()), ((option_string or "").lstrip("-"), values)]


def add_edits(parser: argparse.ArgumentParser) -> None:
    """`--use`, `--target` and `--set`, which may be repeated and are applied in the order in which they stand."""
    parser.add_argument(
        "--use", action=_InOrder, metavar="FEATURE[:KEY=VALUE,...]", help="attach a feature, as axcore.use does"
    )
    parser.add_argument(
        "--target", action=_InOrder, metavar="ACCELERATOR", help="lay it out for hardware such as gpu-h100-8x4"
    )
    parser.add_argument("--set", action=_InOrder, metavar="PATH=VALUE", help="override one value")
    parser.set_defaults(edits=[])


def compose(recipe: str, edits: Sequence[tuple[str, str]]) -> Any:
    """The config of a recipe with edits from the command line applied."""
    from axcore.config import override, pipe
    from axcore.plugin import recipe as find_recipe, target, use_text

    cfg = find_recipe(recipe)
    for kind, text in edits:
        if kind == "set":
            cfg = override(cfg, [text])
        else:
            cfg = pipe(cfg, use_text(text) if kind == "use" else target(text))
    return cfg
