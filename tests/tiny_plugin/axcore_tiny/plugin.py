"""What axcore-tiny offers. Imports neither jax nor flax."""

from axcore.plugin import Recipe, hookimpl


@hookimpl
def axcore_recipes():
    return [Recipe("tiny", "axcore_tiny.recipes:tiny", "Two layers of 16 features; its corpus folder is REQUIRED.")]
