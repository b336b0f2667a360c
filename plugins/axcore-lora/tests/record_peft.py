"""Writes small random adapters and the logits of PEFT with them. Requires `peft` and `transformers`.

python tests/record_peft.py
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

BASES = Path(__file__).parents[2] / "axcore-hf/tests/parity/recorded"
HERE = Path(__file__).parent / "peft"
IDS = np.random.default_rng(0).integers(3, 30, (2, 12))
MODULES = {
    "gpt2": ["c_attn", "c_fc", "c_proj"],
    "gpt_neox": ["dense", "dense_4h_to_h", "dense_h_to_4h", "lm_head", "query_key_value"],
    "llama": ["down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj"],
    "phi3": ["gate_up_proj", "qkv_proj"],
}

for name, modules in MODULES.items():
    base = AutoModelForCausalLM.from_pretrained(BASES / name, dtype=torch.float32, attn_implementation="eager")
    cfg = LoraConfig(
        r=3,
        lora_alpha=5,
        use_rslora=name == "llama",
        target_modules=modules,
        rank_pattern={modules[0]: 2},
        alpha_pattern={rf"1\..*\.{modules[-1]}": 9},
        layers_to_transform=[1] if name == "phi3" else None,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    model = get_peft_model(base, cfg).eval()
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            torch.nn.init.normal_(parameter, std=0.3)
    shutil.rmtree(HERE / name, ignore_errors=True)
    model.save_pretrained(HERE / name)
    (HERE / name / "README.md").unlink(missing_ok=True)
    config = HERE / name / "adapter_config.json"
    config.write_text(config.read_text().replace(str(BASES / name), name))
    (HERE / name / "adapter_model.safetensors").chmod(0o644)
    with torch.no_grad():
        logits = model(torch.tensor(IDS)).logits.numpy()
        with model.disable_adapter():
            base_logits = model(torch.tensor(IDS)).logits.numpy()
    np.savez(HERE / name / "reference.npz", ids=IDS, logits=logits, base=base_logits)
