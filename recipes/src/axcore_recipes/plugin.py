"""What axcore-recipes offers. Imports neither jax nor flax."""

from axcore.plugin import MeshRule, Recipe, hookimpl


@hookimpl
def axcore_recipes() -> list[Recipe]:
    return [
        Recipe("llama-1b", "axcore_recipes.llama:llama_1b", "Llama, 1.1B parameters, for one large accelerator."),
        Recipe("llama2-7b", "axcore_recipes.llama:llama2_7b", "Llama 2 7B, as in its paper."),
        Recipe("quickstart", "axcore_recipes.quickstart:quickstart", "A small byte-level Llama on Python's source."),
    ]


@hookimpl
def axcore_mesh_rules() -> list[MeshRule]:
    rules = "axcore_recipes.mesh_rules"
    return [
        MeshRule("cpu", f"{rules}:hybrid", "FSDP over the devices of a host, data parallel over hosts.", "cpu-*"),
        MeshRule("gpu", f"{rules}:hybrid", "FSDP over the GPUs of a host, data parallel over hosts.", "gpu-*"),
        MeshRule("gpu-h100", f"{rules}:h100", "As gpu; attention tries cuDNN first.", "gpu-h100-*"),
        MeshRule("tpu", f"{rules}:tpu", "FSDP over a slice, data parallel over slices; remat by memory.", "tpu-*"),
    ]
