"""What axcore-new-recipe offers. Imports neither jax nor flax."""

from axcore.plugin import Recipe, hookimpl

axcore_api = 2


@hookimpl
def axcore_recipes() -> list[Recipe]:
    return [Recipe("new-recipe", "axcore_new_recipe.model:small", "A small byte-level model of Python code.")]
