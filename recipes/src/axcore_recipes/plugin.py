"""What axcore-recipes offers. Imports neither jax nor flax."""

from axcore.plugin import Recipe, hookimpl


@hookimpl
def axcore_recipes() -> list[Recipe]:
    return [
        Recipe("llama-1b", "axcore_recipes.llama:llama_1b", "Llama, 1.1B parameters, for one large accelerator."),
        Recipe("llama2-7b", "axcore_recipes.llama:llama2_7b", "Llama 2 7B, as in its paper."),
        Recipe("quickstart", "axcore_recipes.quickstart:quickstart", "A small byte-level Llama on Python's source."),
    ]
