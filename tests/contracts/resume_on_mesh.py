"""Trains the recipe `tiny` on the CPU devices of this process, whose number XLA_FLAGS sets.

`python -m tests.contracts.resume_on_mesh CORPUS FOLDER STEPS AXIS=SIZE ... [--resume]`
"""

import pathlib
import sys

import axcore as ax
from axcore.train import JsonlWriter, Saving


def config(corpus, steps, shape):
    cfg = ax.pipe(ax.recipe("tiny"), ax.use("rope"))
    cfg = ax.override(cfg, [f"input.source.folder={corpus}", f"steps={steps}", "input.batch_size=8"])
    callbacks = {"metrics": JsonlWriter.Config(), "saving": Saving.Config(every_steps=3)}
    return cfg.set(callbacks=callbacks, mesh=ax.Mesh(shape=shape), learner=cfg.learner.set(schedule=RATE))


RATE = ax.recipe("tiny").learner.schedule.set(decay=0.01)


if __name__ == "__main__":
    corpus, folder, steps, *axes = [each for each in sys.argv[1:] if each != "--resume"]
    sizes = {name: int(size) for name, size in (each.split("=") for each in axes)}
    ax.fit(config(corpus, int(steps), sizes), pathlib.Path(folder), resume="--resume" in sys.argv)
