"""Training: the trainer, the learner, input, checkpoints and callbacks."""

from axcore.train.callbacks.base import Callback, CallbackRequest, FinishedRun, RunInfo, StepInfo
from axcore.train.callbacks.evaluation import BitsPerByte, Evaluation, Evaluator, ValidationLoss
from axcore.train.callbacks.progress import Progress
from axcore.train.callbacks.saving import Saving
from axcore.train.callbacks.snapshot import Snapshot
from axcore.train.callbacks.tensorboard import TensorBoardWriter
from axcore.train.callbacks.writers import JsonlWriter, Writer
from axcore.train.checkpoint.initial import FromRun, Initial, use_run_weights
from axcore.train.checkpoint.manager import Checkpointer
from axcore.train.checkpoint.model_folder import ModelFolder, save_model
from axcore.train.errors import RunStopped, TrainingError
from axcore.train.run.trainer import Trainer, fit
from axcore.train.step.learner import AdamW, Learner, Optimizer, transformation_of
from axcore.train.step.objective import CrossEntropy, Objective
from axcore.train.step.schedule import Schedule, WarmupCosine, WarmupStableDecay

__all__ = [
    "AdamW",
    "BitsPerByte",
    "Callback",
    "CallbackRequest",
    "Checkpointer",
    "CrossEntropy",
    "Evaluation",
    "Evaluator",
    "FinishedRun",
    "FromRun",
    "Initial",
    "JsonlWriter",
    "Learner",
    "ModelFolder",
    "Objective",
    "Optimizer",
    "Progress",
    "RunInfo",
    "RunStopped",
    "Saving",
    "Schedule",
    "Snapshot",
    "StepInfo",
    "TensorBoardWriter",
    "Trainer",
    "TrainingError",
    "ValidationLoss",
    "WarmupCosine",
    "WarmupStableDecay",
    "Writer",
    "fit",
    "save_model",
    "transformation_of",
    "use_run_weights",
]


def __dir__() -> list[str]:
    return __all__
