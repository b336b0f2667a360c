"""Writes transformers.npz: values and gradients of the mixtures of experts of `transformers`. Requires `transformers`.

python tests/record_transformers.py
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

DIM, HIDDEN, EXPERTS = 8, 6, 8


def blocks():
    shared = {"hidden_size": DIM, "num_local_experts": EXPERTS, "num_experts_per_tok": 3}
    yield "mixtral", MixtralSparseMoeBlock(MixtralConfig(intermediate_size=HIDDEN, **shared))
    qwen = {"hidden_size": DIM, "num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": HIDDEN}
    yield "qwen3", Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(norm_topk_prob=True, **qwen))
    yield "qwen3_raw", Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(norm_topk_prob=False, **qwen))
    deepseek = DeepseekV3Config(
        hidden_size=DIM,
        moe_intermediate_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        n_shared_experts=2,
    )
    yield "deepseek", DeepseekV3MoE(deepseek)
    yield "gpt_oss", GptOssMLP(GptOssConfig(intermediate_size=HIDDEN, **shared))


def main() -> None:
    torch.manual_seed(0)
    arrays = {"version": np.array(transformers.__version__)}
    x = torch.randn(2, 5, DIM)
    arrays["x"] = x.numpy()
    for name, block in blocks():
        block = block.eval()
        for parameter in [*block.parameters(), *block.buffers()]:
            parameter.data = 0.5 * torch.randn(parameter.shape)
        x.grad = None
        out = block(x.requires_grad_())
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        arrays[f"{name}.out"], arrays[f"{name}.dx"] = out.detach().numpy(), x.grad.numpy()
        for key, value in block.state_dict().items():
            arrays[f"{name}/{key}"] = value.numpy()
    logits = tuple(torch.randn(10, EXPERTS) for _ in range(2))
    arrays["loss.logits"] = torch.stack(logits).numpy()
    arrays["loss.one_layer"] = load_balancing_loss_func(logits[:1], EXPERTS, 3).numpy()
    arrays["loss.two_layers"] = load_balancing_loss_func(logits, EXPERTS, 3).numpy()
    np.savez_compressed(Path(__file__).parent / "transformers.npz", **arrays)


if __name__ == "__main__":
    main()
