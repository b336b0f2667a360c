"""Estimates of the memory of a training step, from the config of a model. `axcore aot` measures it."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax

from axcore.aot.chips import CHIPS, XLA_GPU_FRACTION
from axcore.config import Config, has_field, walk
from axcore.module import abstract
from axcore.nn import CausalLM, GroupedMatmul, layers_of
from axcore.plugin import Accelerator
from axcore.train import Trainer

MEMORY = re.compile(r"(\d+)gb")
ACTIVATION_BYTES, LOGIT_BYTES, SUM_BYTES = 2, 4, 4
"""Bytes of an activation or a gathered weight in bfloat16, of a logit and its gradient, and of a float32 sum."""
ALL_VALUES_FACTOR = 1.4
"""Bytes of all intermediate values of a layer, divided by the bytes of its inputs and tagged values: measured 1.4 for
Llama 1.1B and 1.3 for Llama2-7B, unrolled, on one and two H200s."""
ROUTED_COPIES = 4
"""Arrays with a row for each expert of each token in one layer: inputs and results of the experts, and gradients."""
ROUTED_TOKENS = 8192
"""Tokens of a microbatch for which the padding of grouped products is estimated. The default, blocks of about half an
average group, pads by 25% to 50% for every number of tokens."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a language model and its batch.

    Attributes:
        parameters: bytes of the parameters.
        layer: bytes of the parameters of one layer in bfloat16.
        experts: number of parameters of the experts of one layer.
        head: number of parameters of the head.
        layers: number of layers.
        dim: features of the residual stream.
        tagged: features per token with one of the tags query, key, value, heads, gate and up, in all layers.
        copied: features per token of the copies for its experts, in one layer.
        vocab: columns of the logits.
        rows: rows of the global batch.
        seq_len: tokens of a row.
        chunk: tokens of a device whose logits exist at the same time; None: all.
    """

    parameters: int
    layer: int
    experts: int
    head: int
    layers: int
    dim: int
    tagged: int
    copied: int
    vocab: int
    rows: int
    seq_len: int
    chunk: int | None

    @classmethod
    def of(cls, cfg: Trainer.Config) -> Sizes | None:
        """The sizes of a config; None if its model is not a language model, or its input does not yield rows of
        tokens."""
        model = cfg.model
        rows, seq_len = (getattr(cfg.input, name, None) for name in ("batch_size", "seq_len"))
        if not (isinstance(model, CausalLM.Config) and isinstance(rows, int) and isinstance(seq_len, int)):
            return None
        count, experts, size = _parameters(model)
        layers = layers_of(model.decoder)
        embeddings = model.vocab_size * model.dim * (1 if model.head is None else 2)
        chunk = getattr(cfg.objective, "chunk", None)
        return cls(
            parameters=size,
            layer=max(0, count - embeddings) // max(1, len(layers)) * ACTIVATION_BYTES,
            experts=experts // max(1, len(layers)),
            head=model.vocab_size * model.dim,
            layers=len(layers),
            dim=model.dim,
            tagged=sum(_tagged(place.config, model.dim) for place in layers),
            copied=max(
                (ROUTED_COPIES * model.dim * top_k for place in layers if (top_k := _top_k(place.config))), default=0
            ),
            vocab=model.vocab_size,
            rows=rows,
            seq_len=seq_len,
            chunk=chunk,
        )

    @property
    def gathered(self) -> float:
        """Bytes of the parameters that FSDP gathers on one device (those of two layers and of the head), and of
        gradients before they are reduced: those of the head and of the experts of one layer, summed in float32."""
        head_gradient = ACTIVATION_BYTES if self.chunk is None else SUM_BYTES
        return 2 * self.layer + SUM_BYTES * self.experts + (ACTIVATION_BYTES + head_gradient) * self.head

    def activations(self, rows: int, kept: float) -> float:
        """Bytes of activations on one device during a microbatch.

        Args:
            rows: rows of the microbatch on the device.
            kept: features per token that are kept for the backward pass.
        """
        one_layer = 2 * ALL_VALUES_FACTOR * self.tagged / max(1, self.layers) + self.copied  # values and gradients
        tokens = rows * self.seq_len
        scored = tokens if self.chunk is None else min(self.chunk, tokens)
        return tokens * (kept + one_layer) * ACTIVATION_BYTES + scored * self.vocab * LOGIT_BYTES


def memory(accelerator: Accelerator) -> float:
    """Bytes that a program may use on one device. The name of a GPU may contain its memory, as in `gpu-a100-40gb-8`."""
    kind, _, size = accelerator.kind.partition("-")
    chip = next(chip for chip in CHIPS if (chip.platform, chip.kind) == (accelerator.platform, kind))
    if chip.platform != "gpu":
        return chip.usable
    named_size = MEMORY.fullmatch(size)
    return XLA_GPU_FRACTION * (int(named_size[1]) * 10**9 if named_size else chip.memory)


@functools.lru_cache(maxsize=8)  # tracing the initializers of a large model takes a second
def _parameters(model: Config) -> tuple[int, int, int]:
    """The number of parameters, how many of them are experts', and the bytes of all."""
    _, params, _ = abstract(model, "model")
    leaves = jax.tree.leaves_with_path(params)
    experts = [
        leaf for path, leaf in leaves if "experts" in jax.tree_util.keystr(path, simple=True, separator=".").split(".")
    ]
    return (
        sum(leaf.size for _, leaf in leaves),
        sum(leaf.size for leaf in experts),
        sum(leaf.size * leaf.dtype.itemsize for _, leaf in leaves),
    )


def _top_k(layer: Config) -> int:
    """The number of experts of a token; 0 without a mixture."""
    return next((getattr(node, "top_k", 0) for _, node in walk(layer) if has_field(node, "top_k")), 0)


def _routed_rows(layer: Config) -> float:
    """The rows of grouped products for each token of a layer, with padding; 1 without a mixture."""
    top_k = max(1, _top_k(layer))
    for _, node in walk(layer):
        matmul, count = getattr(node, "matmul", None), _num_experts(layer)
        if isinstance(matmul, GroupedMatmul) and count:
            align = matmul.align(ROUTED_TOKENS * top_k, count)
            return top_k + (align * count / ROUTED_TOKENS if align > 1 else 0)
    return top_k


def _num_experts(layer: Config) -> int:
    return next((getattr(node, "num_experts", 0) for _, node in walk(layer) if has_field(node, "num_experts")), 0)


def _tagged(layer: Config, dim: int) -> int:
    """Features per token of a layer that have one of the tags of the core."""
    routed, found = _routed_rows(layer), 0
    for path, node in walk(layer):
        if isinstance(hidden := getattr(node, "hidden_dim", None), int):
            found += round(2 * hidden * (routed if "experts" in path.split(".") else 1))
        if isinstance(heads := getattr(node, "num_heads", None), int):
            features = getattr(node, "head_dim", None) or getattr(node, "value_dim", None) or dim // heads
            found += 2 * features * (heads + (getattr(node, "num_kv_heads", None) or heads))
    return found
