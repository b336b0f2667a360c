"""One of two processes that train together, of which one is killed within a step.

`python -m tests.train.killed_process CORPUS FOLDER STEP VICTIM`, started by `axcore.runtime.launch`. Step 0 kills none.
Resumes the run in FOLDER if there is one.
"""

import os
import pathlib
import signal
import sys
import time

from axcore.runtime import signals

signals.install()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import io_callback  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

import axcore as ax  # noqa: E402
from axcore.runtime import failures  # noqa: E402
from axcore.train import Callback  # noqa: E402

from .two_processes import MESH, SAVED, config  # noqa: E402


class Killed(Callback):
    """Kills the victim while the devices of both processes compute a step, once the checkpoint of an earlier step is on
    the disk. A sum over all devices follows."""

    class Config(Callback.Config):
        at: int
        victim: int

    def start(self, run):
        self._checkpoint = run.folder / "checkpoints" / str(SAVED)

    def device_init(self, params):
        return {"sum": jnp.zeros((), jnp.int32)}

    def device_update(self, state, params, step):
        mesh = MESH.make().mesh

        def summed(step):
            return jax.lax.psum(io_callback(self._pass, jax.ShapeDtypeStruct((), jnp.int32), step), mesh.axis_names)

        whole = PartitionSpec()
        return {"sum": jax.shard_map(summed, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)(step)}

    def _pass(self, step):
        if step == self.config.at and ax.runtime.index() == self.config.victim:
            while not self._checkpoint.exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return step


def main(corpus, folder, at, victim):
    ax.runtime.start()
    cfg = config(corpus)
    cfg = cfg.set(callbacks=cfg.callbacks | {"killed": Killed.Config(at=at, victim=victim)})
    ax.fit(cfg, folder, resume=folder.exists())


if __name__ == "__main__":
    try:
        main(sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    except ax.AxcoreError as error:
        print(f"killed_process: {error}", file=sys.stderr)
        failures.record(error)
        ax.runtime.leave(error.exit_code)
    ax.runtime.leave(0)
