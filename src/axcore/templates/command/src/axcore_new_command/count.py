"""`axcore new-command RECIPE`."""

from __future__ import annotations

import argparse

import axcore as ax


def main(arguments: list[str]) -> int:
    """Prints the number of parameters of a recipe's model. Shapes are traced; nothing is computed."""
    parser = argparse.ArgumentParser(prog="axcore new-command", description="Counts the parameters of a recipe.")
    parser.add_argument("recipe")
    cfg = ax.recipe(parser.parse_args(arguments).recipe)

    import jax  # here, so that `axcore new-command --help` is fast

    from axcore.config import get
    from axcore.module import abstract

    _, params, _ = abstract(get(cfg, "model"))
    print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,}")
    return 0
