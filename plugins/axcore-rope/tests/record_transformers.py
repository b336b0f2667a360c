"""Writes transformers.npz: the values of `transformers` for each kind of RoPE and for ALiBi. Requires `transformers`.

python tests/record_transformers.py
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

HEAD_DIM, LENGTH = 16, 64
LONG = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 16,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn_bounds": {"rope_type": "yarn", **YARN, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
    "yarn_mscale": {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn_factor": {"rope_type": "yarn", **YARN, "attention_factor": 1.25},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {"rope_type": "longrope", **LONG},
    "longrope_factor": {"rope_type": "longrope", **LONG, "factor": 2.0, "attention_factor": 1.5},
}


def main() -> None:
    arrays = {}
    for name, parameters in CASES.items():
        config = LlamaConfig(
            hidden_size=4 * HEAD_DIM,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            rope_parameters={"rope_theta": 10_000.0, **parameters},
        )
        for length in (10, 100):
            rates, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
            arrays[f"{name}.{length}"] = np.append(rates.numpy(), factor)
    places = torch.arange(30).reshape(3, 1, 10) % torch.tensor([7, 11, 13])[:, None, None]
    arrays["mrope.positions"] = places.numpy()
    x = torch.zeros(1, 10, HEAD_DIM)
    qwen2 = Qwen2VLTextConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
    )
    cos, sin = Qwen2VLRotaryEmbedding(qwen2)(x, places)
    arrays["mrope.cos"], arrays["mrope.sin"] = cos.numpy(), sin.numpy()
    qwen3 = Qwen3VLTextConfig(
        hidden_size=4 * HEAD_DIM,
        head_dim=HEAD_DIM,
        num_attention_heads=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    )
    cos, sin = Qwen3VLTextRotaryEmbedding(qwen3)(x, places)
    arrays["interleaved_mrope.cos"], arrays["interleaved_mrope.sin"] = cos.numpy(), sin.numpy()
    for heads in (4, 6, 9):
        arrays[f"alibi.{heads}"] = build_alibi_tensor(torch.ones(1, 5), heads, torch.float32).numpy().reshape(heads, 5)
    folder = Path(__file__).parent
    np.savez_compressed(folder / "transformers.npz", **arrays)
    described = {"transformers": transformers.__version__, "head_dim": HEAD_DIM, "length": LENGTH, "cases": CASES}
    (folder / "transformers.json").write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main()
