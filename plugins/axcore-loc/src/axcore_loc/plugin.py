"""What axcore-loc offers. Imports neither jax nor flax."""

from axcore.plugin import Command, hookimpl


@hookimpl
def axcore_commands() -> list[Command]:
    return [Command("loc", "axcore_loc.cli:main", "Measure the lines that a feature costs in existing modules.")]
