"""What axcore-tiny offers. Imports neither jax nor flax."""

from axcore.plugin import CheckpointFormat, Recipe, hookimpl


@hookimpl
def axcore_recipes():
    return [Recipe("tiny", "axcore_tiny.recipes:tiny", "Two layers of 16 features; its corpus folder is REQUIRED.")]


@hookimpl
def axcore_checkpoint_formats():
    return [CheckpointFormat("npz", "axcore_tiny.npz:Npz", "One NumPy file.")]
