"""What axcore-hf offers. Imports neither jax nor flax."""

from axcore.plugin import Command, Feature, hookimpl
from axcore_hf.owners import brought


@hookimpl
def axcore_commands() -> list[Command]:
    brought()  # raises if a model_type has two owners, so that `axcore doctor` reports it
    return [
        Command("convert", "axcore_hf.commands:convert", "Convert a transformers checkpoint or GGUF file."),
        Command("export", "axcore_hf.commands:export", "Export a transformers checkpoint."),
    ]


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("hf-weights", "axcore_hf.feature:use_hf_weights", "Published weights, with their tokenizer.")]
