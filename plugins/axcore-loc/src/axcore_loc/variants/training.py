"""What the recipes of all variants share."""

from axcore.nn import CausalLM
from axcore.train import Learner, Trainer, WarmupCosine
from axcore.train.input import ByteTokenizer, TextFiles, TextInput


def pretraining(model: CausalLM.Config) -> Trainer.Config:
    """A few steps on short rows of text."""
    return Trainer.Config(
        model=model,
        input=TextInput.Config(source=TextFiles.Config(), tokenizer=ByteTokenizer.Config(), seq_len=16, batch_size=4),
        learner=Learner.Config(schedule=WarmupCosine(peak=1e-3, warmup_steps=1)),
        steps=10,
    )
