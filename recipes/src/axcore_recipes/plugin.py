"""What axcore-recipes offers. Imports neither jax nor flax."""

from axcore.plugin import Recipe, hookimpl


@hookimpl
def axcore_recipes() -> list[Recipe]:
    here = "axcore_recipes"
    return [
        Recipe("deepseek-v3", f"{here}.deepseek:deepseek_v3", "DeepSeek-V3, 671B parameters, 37B active."),
        Recipe("gemma3-4b", f"{here}.gemma3:gemma3_4b", "The text model of Gemma 3 4B."),
        Recipe("gpt-oss-20b", f"{here}.gpt_oss:gpt_oss_20b", "gpt-oss, 20.9B parameters, 3.6B active."),
        Recipe("llama-1b", f"{here}.llama:llama_1b", "Llama, 1.1B parameters, for one large accelerator."),
        Recipe("llama2-7b", f"{here}.llama:llama2_7b", "Llama 2 7B, trained as in its paper."),
        Recipe("llama2-13b", f"{here}.llama:llama2_13b", "Llama 2 13B."),
        Recipe("llama2-70b", f"{here}.llama:llama2_70b", "Llama 2 70B."),
        Recipe("llama3-8b", f"{here}.llama:llama3_8b", "Llama 3 8B."),
        Recipe("llama3-70b", f"{here}.llama:llama3_70b", "Llama 3 70B."),
        Recipe("mixtral-8x7b", f"{here}.mixtral:mixtral_8x7b", "Mixtral, 46.7B parameters, 12.9B active."),
        Recipe("quickstart", f"{here}.quickstart:quickstart", "A small byte-level language model of Python code."),
        Recipe("qwen3-0.6b", f"{here}.qwen3:qwen3_0_6b", "Qwen3 0.6B."),
        Recipe("qwen3-8b", f"{here}.qwen3:qwen3_8b", "Qwen3 8B."),
        Recipe("qwen3-30b-a3b", f"{here}.qwen3:qwen3_30b_a3b", "Qwen3, 30.5B parameters, 3.3B active."),
        Recipe("smollm2-135m", f"{here}.smollm2:smollm2_135m", "SmolLM2 135M, with its published weights."),
    ]
