"""What axcore-recipes offers. Imports neither jax nor flax."""

from axcore.plugin import Recipe, hookimpl


@hookimpl
def axcore_recipes() -> list[Recipe]:
    return [
        Recipe("quickstart", "axcore_recipes.quickstart:quickstart", "A small byte-level Llama on Python's source."),
    ]
