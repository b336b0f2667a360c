"""quickstart: a small byte-level Llama, trained on the standard library of the Python that runs it."""

from __future__ import annotations

import axcore as ax
from axcore.nn import Attention, CausalLM, FanIn, FeedForward, Linear, Repeat, TransformerLayer, Zeros
from axcore.train import AdamW, CrossEntropy, Learner, Saving, Trainer, WarmupStableDecay
from axcore.train.data import ByteTokenizer, TextInput
from axcore_recipes.corpus import StandardLibrary
from axcore_recipes.text_reports import CompressionReport, LossPlot, SampleReport


def quickstart() -> Trainer.Config:
    """A decoder of 0.8M parameters that two CPU cores train in four minutes.

    It is small because at this budget tokens are worth more than parameters, and its rows are short because attention
    over them is what a CPU spends most time on.
    """
    tokenizer = ByteTokenizer.Config()
    into, out_of = Linear.Config(init=FanIn()), Linear.Config(init=Zeros())  # each layer starts as the identity
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=2, num_kv_heads=1, query=into, key=into, value=into, projection=out_of),
        ffn=FeedForward.Config(hidden_dim=384, gate=into, up=into, down=out_of),
    )
    cfg = Trainer.Config(
        model=CausalLM.Config(
            vocab_size=tokenizer.build().vocab_size,
            dim=128,
            decoder=Repeat.Config(num_layers=4, layers=layer, unroll=4),
            head=None,
        ),
        objective=CrossEntropy.Config(z_loss=1e-4),
        input=TextInput.Config(source=StandardLibrary.Config(), tokenizer=tokenizer, seq_len=128, batch_size=8),
        learner=Learner.Config(
            optimizer=AdamW.Config(weight_decay=0.1),
            schedule=WarmupStableDecay(peak=2e-3, warmup_steps=50, decay=0.4),
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
    return ax.pipe(cfg.set(callbacks=callbacks), ax.use("rope"))
