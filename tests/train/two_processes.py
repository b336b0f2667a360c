"""One of two processes that train together. Prints its results and errors as JSON.

`python -m tests.train.two_processes PROCESS PORT CORPUS FOLDER`
"""

import json
import pathlib
import shutil
import sys

import jax

import axcore as ax
from axcore.train import Checkpointer, FromRun, Saving
from axcore.train.callbacks.writers import read_jsonl

STEPS, SAVED = 6, 3
MESH = ax.Mesh(shape={"data": 1, "fsdp": -1})


def config(corpus):
    """The recipe `tiny`, with the batch over all devices."""
    cfg = ax.pipe(ax.recipe("tiny"), ax.use("rope"))
    cfg = ax.override(cfg, [f"input.source.folder={corpus}", f"steps={STEPS}"])
    return cfg.set(callbacks=cfg.callbacks | {"saving": Saving.Config(every_steps=SAVED)}, mesh=MESH)


def losses(folder):
    return [row["train/loss"] for row in read_jsonl(folder / "metrics.jsonl") if "train/loss" in row]


def told(run):
    try:
        run()
    except ax.AxcoreError as error:
        return str(error)
    return "nothing"


def main(process, port, corpus, folder):
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    cfg, found = config(corpus), {}
    clipped = cfg.set(learner=cfg.learner.set(clip_norm=1.0 + process), seed=process)
    found["other config"] = told(lambda: ax.fit(clipped, folder / "other"))
    if "nothing was trained" in told(lambda: ax.fit(cfg, folder / "run")):  # the plugins differ
        found["other plugin"] = told(lambda: ax.fit(cfg, folder / "run"))
        return found
    found["minutes"] = told(lambda: ax.fit(cfg.set(steps=None, minutes=1.0), folder / "minutes"))
    blocked = folder / "blocked"
    if process == 0:
        blocked.touch()  # a file, so process 0 cannot create the run folder
    found["folder"] = told(lambda: ax.fit(cfg, blocked))
    checkpoints = folder / "run/checkpoints"
    with ax.runtime.together("removal"):
        if process == 0:
            shutil.rmtree(checkpoints / str(STEPS))
    found["steps"] = Checkpointer.Config().build(checkpoints).steps()
    straight = losses(folder / "run")
    summary = ax.fit(cfg, folder / "run", resume=True)
    resumed = losses(folder / "run")
    # Orbax reads the weights on both processes, which wait for each other.
    begun = cfg.set(initial=FromRun.Config(folder=str(folder / "run"), step=3), steps=2)
    ax.fit(begun, folder / "begun")
    found["begun"] = losses(folder / "begun")
    return found | {"summary": summary, "straight": straight, "resumed": resumed, "devices": jax.device_count()}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4]))))
