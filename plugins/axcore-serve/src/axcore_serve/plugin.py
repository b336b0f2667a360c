"""What axcore-serve offers. Imports neither jax nor flax."""

from axcore.plugin import Command, hookimpl


@hookimpl
def axcore_commands() -> list[Command]:
    return [Command("serve", "axcore_serve.command:main", "Serve a model over HTTP with the API of OpenAI.")]
