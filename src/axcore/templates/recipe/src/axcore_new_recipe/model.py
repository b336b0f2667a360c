"""A small decoder and its training settings, as one config."""

from __future__ import annotations

import axcore as ax
from axcore.nn import Attention, Causal, CausalLM, FeedForward, Repeat, SameSegment, SlidingWindow, TransformerLayer
from axcore.train import AdamW, Learner, Trainer, WarmupCosine
from axcore.train.data import ByteTokenizer, TextInput
from axcore_recipes.corpus import StandardLibrary


def small() -> Trainer.Config:
    """A decoder of 0.4M parameters, trained on the standard library of the running Python.

    Attention in both layers has a sliding window of 64 bytes, half a row.
    """
    tokenizer = ByteTokenizer.Config()
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=4, num_kv_heads=2, mask=Causal() & SameSegment() & SlidingWindow(size=64)),
        ffn=FeedForward.Config(hidden_dim=384),
    )
    cfg = Trainer.Config(
        model=CausalLM.Config(
            vocab_size=tokenizer.build().vocab_size,
            dim=128,
            decoder=Repeat.Config(num_layers=2, layers=layer),
            head=None,  # tied to the embedding
        ),
        input=TextInput.Config(source=StandardLibrary.Config(), tokenizer=tokenizer, seq_len=128, batch_size=8),
        learner=Learner.Config(optimizer=AdamW.Config(), schedule=WarmupCosine(peak=2e-3, warmup_steps=50)),
        steps=1000,
    )
    return ax.pipe(cfg, ax.use("rope", theta=1000.0))  # theta is small, since rows are short
