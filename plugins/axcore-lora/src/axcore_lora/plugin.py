"""What axcore-lora offers. Imports neither jax nor flax."""

from axcore.plugin import Command, Feature, hookimpl


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("lora", "axcore_lora.attach:use_lora", "LoRA or DoRA on every linear layer, the rest frozen.")]


@hookimpl
def axcore_commands() -> list[Command]:
    return [Command("merge", "axcore_lora.commands:merge", "Merge the adapters of a run into its weights.")]
