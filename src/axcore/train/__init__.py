"""Training: the trainer, the learner, input, checkpoints and metrics."""

from axcore.train.checkpoint import Checkpointer
from axcore.train.checkpoint_format import CheckpointFormat
from axcore.train.initial import FromRun, Initial
from axcore.train.learner import AdamW, Learner, Optimizer
from axcore.train.loop import TrainingError
from axcore.train.metrics import JsonlWriter, TensorBoardWriter, Writer
from axcore.train.model_folder import ModelFolder, save_model
from axcore.train.objective import CrossEntropy, Objective
from axcore.train.orbax_format import OrbaxFormat
from axcore.train.report import FinishedRun, Report
from axcore.train.schedule import Schedule, WarmupCosine, WarmupStableDecay
from axcore.train.trainer import Trainer, fit

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
]
