"""Training settings that all variants share."""

from axcore.nn import CausalLM
from axcore.train import CrossEntropy, Learner, Objective, Trainer, WarmupCosine
from axcore.train.data import ByteTokenizer, TextFiles, TextInput

NEXT_TOKEN = CrossEntropy.Config()


def pretraining(model: CausalLM.Config, objective: Objective.Config = NEXT_TOKEN) -> Trainer.Config:
    """A few steps on short rows of text."""
    return Trainer.Config(
        model=model,
        objective=objective,
        input=TextInput.Config(source=TextFiles.Config(), tokenizer=ByteTokenizer.Config(), seq_len=16, batch_size=4),
        learner=Learner.Config(schedule=WarmupCosine(peak=1e-3, warmup_steps=1)),
        steps=10,
    )
