"""What axcore-new-command offers. Imports neither jax nor flax."""

from axcore.plugin import Command, hookimpl

axcore_api = 2


@hookimpl
def axcore_commands() -> list[Command]:
    target = "axcore_new_command.count:main"
    return [Command("new-command", target, "Counts the parameters of a recipe.")]
