"""The recipe `tiny`."""

from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.train import CrossEntropy, Learner, Saving, Trainer, WarmupStableDecay
from axcore.train.data import ByteTokenizer, TextFiles, TextInput


def edit(cfg):
    """Changes the recipe. Tests replace it."""
    return cfg


def tiny():
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=2, num_kv_heads=1), ffn=FeedForward.Config(hidden_dim=32)
    )
    cfg = Trainer.Config(
        model=CausalLM.Config(
            vocab_size=ByteTokenizer.Config().build().vocab_size,
            dim=16,
            decoder=Repeat.Config(num_layers=2, layers=layer),
        ),
        objective=CrossEntropy.Config(z_loss=1e-3),
        input=TextInput.Config(
            source=TextFiles.Config(validation_percent=25.0), seq_len=16, batch_size=4, prefetch_batches=0
        ),
        learner=Learner.Config(schedule=WarmupStableDecay(peak=1e-2, warmup_steps=5)),
        steps=30,
    )
    saving = Saving.Config(every_steps=10, every_minutes=None)
    return edit(cfg.set(callbacks=cfg.callbacks | {"saving": saving}))
