"""quickstart: a small byte-level language model, trained on the standard library of the running Python."""

from __future__ import annotations

import axcore as ax
from axcore.nn import Attention, CausalLM, FanIn, FeedForward, Linear, Repeat, Zeros, squared_relu
from axcore.train import AdamW, CrossEntropy, Learner, Saving, Trainer, WarmupStableDecay
from axcore.train.data import ByteTokenizer, TextInput
from axcore_recipes.corpus import StandardLibrary
from axcore_recipes.short_conv import ConvTransformerLayer
from axcore_recipes.text_reports import CompressionReport, LossPlot, SampleReport


def quickstart() -> Trainer.Config:
    """A decoder with 0.5M parameters that compresses better than `zlib -9` after four minutes on two CPU cores.

    At this budget tokens matter more than parameters, so the model is cheap on a CPU: few layers, one attention head,
    and a feed-forward block without a gate. Rows of 256 bytes let the model copy from its context, and short
    convolutions let it learn this within the first minute. Muon requires fewer tokens than AdamW.
    """
    tokenizer = ByteTokenizer.Config()
    into, out_of = Linear.Config(init=FanIn()), Linear.Config(init=Zeros())  # each layer starts as the identity
    layer = ConvTransformerLayer.Config(
        attention=Attention.Config(num_heads=1, head_dim=64, query=into, key=into, value=into, projection=out_of),
        ffn=FeedForward.Config(hidden_dim=512, activation=squared_relu, gate=None, up=into, down=out_of),
    )
    cfg = Trainer.Config(
        model=CausalLM.Config(
            vocab_size=tokenizer.build().vocab_size,
            dim=128,
            decoder=Repeat.Config(num_layers=3, layers=layer, unroll=3),
            head=None,
        ),
        objective=CrossEntropy.Config(z_loss=1e-4),
        input=TextInput.Config(source=StandardLibrary.Config(), tokenizer=tokenizer, seq_len=256, batch_size=8),
        learner=Learner.Config(
            optimizer=AdamW.Config(weight_decay=0.1),
            schedule=WarmupStableDecay(peak=6e-3, warmup_steps=50, decay=0.4),
        ),
        minutes=3.6,
    )
    callbacks = {
        **cfg.callbacks,
        "saving": Saving.Config(every_minutes=0.5),
        "compressors": CompressionReport.Config(),
        "loss_plot": LossPlot.Config(),
        "sample": SampleReport.Config(),
    }
    # On a CPU, bfloat16 does not speed up Muon's iteration, and in float32 the result does not depend on the layout.
    return ax.pipe(cfg.set(callbacks=callbacks), ax.use("rope"), ax.use("muon", dtype="float32"))
