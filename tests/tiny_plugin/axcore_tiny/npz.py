"""A checkpoint format of another kind than Orbax: one .npz file, written before `save` returns."""

import time

import jax
import numpy as np

from axcore.train import CheckpointFormat


class Npz(CheckpointFormat):
    """The bytes of each array; NumPy's files know neither bfloat16 nor float8."""

    class Config(CheckpointFormat.Config):
        seconds: float = 0.0
        """Makes a save last, so that there is time to kill the process in it."""

    def save(self, folder, arrays):
        folder.mkdir()
        plain = {path: np.asarray(array).reshape(-1).view(np.uint8) for path, array in arrays.items()}
        np.savez(folder / "arrays.npz", **plain)
        time.sleep(self.config.seconds)

    def restore(self, folder, wanted):
        with np.load(folder / "arrays.npz") as stored:
            return {
                path: jax.device_put(stored[path].view(form.dtype).reshape(form.shape), form.sharding)
                for path, form in wanted.items()
            }
