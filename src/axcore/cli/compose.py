"""The arguments shared by all commands that take a recipe, and the config that they compose."""

from __future__ import annotations

import argparse
import contextlib
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


def add_edits(parser: argparse.ArgumentParser, *, target: bool = True) -> None:
    """Adds `--use`, `--target` and `--set`, which may be repeated and are applied in the given order.

    Args:
        target: whether the command uses the mesh, and so takes `--target`.
    """
    parser.add_argument(
        "--use",
        action=_InOrder,
        metavar="NAME[:KEY=VALUE,...]",
        help="attach a feature or another offer, such as rope:theta=5e4; `axcore plugins` lists them",
    )
    if target:
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
    from axcore.plugin import recipe

    if is_folder(name):
        from axcore.train.checkpoint.model_folder import ModelFolder

        cfg = ModelFolder.open(name).cfg
    else:
        cfg = recipe(name)
    return edited(cfg, edits)


def edited(cfg: Any, edits: Sequence[tuple[str, str]]) -> Any:  # Any: as in compose
    """The config with edits from the command line applied."""
    from axcore.config import override, pipe
    from axcore.plugin import target, use_text

    for kind, text in edits:
        if kind == "set":
            cfg = override(cfg, [text])
        else:
            cfg = pipe(cfg, use_text(text) if kind == "use" else target(text))
    return cfg


def split_cpu(edits: Sequence[tuple[str, str]]) -> None:
    """Gives jax the CPU devices of `--target cpu-8`, unless it has started or JAX_NUM_CPU_DEVICES is set."""
    from axcore.plugin import Accelerator

    targets = [Accelerator.parse(text) for kind, text in edits if kind == "target"]
    if targets and targets[-1].platform == "cpu":
        import jax

        # The size of XLA's thread pool. Each running collective blocks a thread. With one thread per device, devices
        # whose programs run several at once can wait for each other forever.
        os.environ.setdefault("NPROC", str(8 * targets[-1].per_host))
        if "JAX_NUM_CPU_DEVICES" not in os.environ:
            with contextlib.suppress(RuntimeError):  # jax has started
                jax.config.update("jax_num_cpu_devices", targets[-1].per_host)
