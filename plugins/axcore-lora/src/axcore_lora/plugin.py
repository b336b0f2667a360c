"""What axcore-lora offers. Imports neither jax nor flax."""

from axcore.plugin import AdaptersOffer, Command, Feature, hookimpl


@hookimpl
def axcore_features() -> list[Feature]:
    return [
        Feature("lora", "axcore_lora.attach:use_lora", "LoRA or DoRA on every linear layer, the rest frozen."),
        Feature("lora-weights", "axcore_lora.initial:use_lora_weights", "Adapters of a folder, to train them further."),
    ]


@hookimpl
def axcore_adapters() -> list[AdaptersOffer]:
    return [AdaptersOffer("lora", "axcore_lora.serving:LoRAAdapters", "LoRA adapters, one for each request.")]


@hookimpl
def axcore_commands() -> list[Command]:
    return [
        Command("adapter", "axcore_lora.commands:adapter", "Write the adapters of a run without its other weights."),
        Command("merge", "axcore_lora.commands:merge", "Merge the adapters of a run into its weights."),
    ]
