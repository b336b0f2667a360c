"""Training: the trainer, the learner, input, checkpoints and metrics."""

from axcore.train.callbacks.report import FinishedRun, Report
from axcore.train.callbacks.writers import JsonlWriter, TensorBoardWriter, Writer
from axcore.train.checkpoint.format import CheckpointFormat
from axcore.train.checkpoint.initial import FromRun, Initial, use_run_weights
from axcore.train.checkpoint.manager import Checkpointer
from axcore.train.checkpoint.model_folder import ModelFolder, save_model
from axcore.train.checkpoint.orbax_format import OrbaxFormat
from axcore.train.run.loop import TrainingError
from axcore.train.run.trainer import Trainer, fit
from axcore.train.step.learner import AdamW, Learner, Optimizer
from axcore.train.step.objective import CrossEntropy, Objective
from axcore.train.step.schedule import Schedule, WarmupCosine, WarmupStableDecay

__all__ = [
    "AdamW",
    "CheckpointFormat",
    "Checkpointer",
    "CrossEntropy",
    "FinishedRun",
    "FromRun",
    "Initial",
    "JsonlWriter",
    "Learner",
    "ModelFolder",
    "Objective",
    "Optimizer",
    "OrbaxFormat",
    "Report",
    "Schedule",
    "TensorBoardWriter",
    "Trainer",
    "TrainingError",
    "WarmupCosine",
    "WarmupStableDecay",
    "Writer",
    "fit",
    "save_model",
    "use_run_weights",
]


def __dir__() -> list[str]:
    return __all__
