"""What axcore-hf offers. Imports neither jax nor flax."""

from axcore.plugin import Check, Command, Feature, hookimpl


@hookimpl
def axcore_commands() -> list[Command]:
    return [
        Command("convert", "axcore_hf.commands:convert", "Convert a transformers checkpoint or GGUF file."),
        Command("export", "axcore_hf.commands:export", "Export a transformers checkpoint."),
    ]


@hookimpl
def axcore_checks() -> list[Check]:
    return [Check("hf-families", "axcore_hf.families:problems", "Families of other distributions can be used.")]


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("hf-weights", "axcore_hf.feature:use_hf_weights", "Published weights, with their tokenizer.")]
