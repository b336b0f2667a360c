"""The arguments shared by all commands that take a recipe, and the config that they compose."""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Sequence
from typing import Any

type Commands = argparse._SubParsersAction[argparse.ArgumentParser]
"""The subcommands of a parser. Each module of this package adds its commands with `add(commands)`."""

RECIPE_OR_FOLDER = "a recipe that `axcore recipes` lists, a run folder or a model folder"


class _InOrder(argparse.Action):
    """Collects `--use`, `--target` and `--set` in one list, in the order of the command line."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        namespace.edits = [*getattr(namespace, "edits", ()), ((option_string or "").lstrip("-"), values)]


def add_edits(parser: argparse.ArgumentParser) -> None:
    """Adds `--use`, `--target` and `--set`, which may be repeated and are applied in the given order."""
    parser.add_argument(
        "--use",
        action=_InOrder,
        metavar="NAME[:KEY=VALUE,...]",
        help="attach a feature or another offer, such as rope:theta=5e4; `axcore plugins` lists them",
    )
    parser.add_argument(
        "--target",
        action=_InOrder,
        metavar="ACCELERATOR",
        help="apply the mesh rule for an accelerator such as gpu-h100-8",
    )
    parser.add_argument(
        "--set",
        action=_InOrder,
        metavar="PATH=VALUE",
        help="set one value, such as model.dtypes.compute=bfloat16; `axcore show` lists the paths",
    )
    parser.set_defaults(edits=[])


def is_folder(name: str) -> bool:
    """Whether a name on the command line is a run folder or model folder, not a recipe."""
    return os.sep in name or bool(name and pathlib.Path(name, "config.json").is_file())


def compose(name: str, edits: Sequence[tuple[str, str]]) -> Any:  # Any: each recipe has its own config class
    """The config of a recipe, a run folder or a model folder, with edits from the command line applied."""
    from axcore.config import override, pipe
    from axcore.plugin import recipe, target, use_text

    if is_folder(name):
        from axcore.train.checkpoint.model_folder import ModelFolder

        cfg = ModelFolder.open(name).cfg
    else:
        cfg = recipe(name)
    for kind, text in edits:
        if kind == "set":
            cfg = override(cfg, [text])
        else:
            cfg = pipe(cfg, use_text(text) if kind == "use" else target(text))
    return cfg
