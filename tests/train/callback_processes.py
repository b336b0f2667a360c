"""One of two processes whose callbacks differ: `python -m tests.train.callback_processes NAME CORPUS FOLDER`."""

import signal
import sys

import axcore as ax
from axcore import runtime
from axcore.runtime import failures
from axcore.train import Callback, CallbackRequest, Evaluation, JsonlWriter, ValidationLoss


class SaveOnFirst(Callback):
    """Requests a checkpoint on process 0 only, like a callback that reads the clock."""

    class Config(Callback.Config):
        at: int

    first_process_only = True

    def due(self, step):
        return CallbackRequest(save=True) if step == self.config.at else None


class StopAt(Callback):
    """Requests a stop, and a checkpoint if `save` is set, after the same step on every process."""

    class Config(Callback.Config):
        at: int
        save: bool = False

    def step(self, info):
        if info.step == self.config.at:
            return CallbackRequest(stop=True, save=self.config.save, deterministic=True)


class Unreadable(ValidationLoss):
    """Cannot read its data on process 1."""

    class Config(ValidationLoss.Config):
        """No fields of its own."""

    def __call__(self, model):
        if runtime.index() == 1:
            raise OSError("the data of process 1 cannot be read")
        return super().__call__(model)


class Terminated(ValidationLoss):
    """Receives SIGTERM on process 1 during the evaluation."""

    class Config(ValidationLoss.Config):
        """No fields of its own."""

    def __call__(self, model):
        if runtime.index() == 1:
            signal.raise_signal(signal.SIGTERM)
        return super().__call__(model)


CALLBACKS = {
    "terminated": {"evaluation": Evaluation.Config(every_steps=3, evaluators={"validation": Terminated.Config()})},
    "flush": {"save": SaveOnFirst.Config(at=5), "stop": StopAt.Config(at=5)},
    "saved": {"stop": StopAt.Config(at=5, save=True)},
    "evaluator": {"evaluation": Evaluation.Config(every_steps=3, evaluators={"validation": Unreadable.Config()})},
    "disabled": {
        "evaluation": Evaluation.Config(
            every_steps=3, evaluators={"validation": Unreadable.Config()}, on_error="disable"
        )
    },
}


def main(name, corpus, folder):
    runtime.start()
    with runtime.watch():
        cfg = ax.pipe(ax.recipe("tiny"), ax.use("rope"))
        cfg = ax.override(cfg, [f"input.source.folder={corpus}", "steps=2000"])
        callbacks = {"metrics": JsonlWriter.Config(), **CALLBACKS[name]}
        summary = ax.fit(cfg.set(callbacks=callbacks, mesh=ax.Mesh(shape={"data": 1, "fsdp": -1})), folder)
    print("steps", summary["steps"], flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ax.AxcoreError as error:
        failures.record(error)
        runtime.leave(error.exit_code)
    runtime.leave(0)
