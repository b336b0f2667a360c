"""One training step on several meshes of eight CPU devices, in a process of its own.

`python -m axcore.testing.devices` reads a pickled request from stdin and writes the pickled results to stdout.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

COUNT = 8


def steps(
    model: Any, batch: Any, meshes: list[Any], objective: Any = None, microbatches: list[int] | None = None
) -> list[dict[str, Any]]:
    """What one step of plain gradient descent does on each mesh; the first may be of one device.

    Args:
        objective: its config; None: cross-entropy.
        microbatches: of the step on each mesh; None: 1.

    Returns:
        For each mesh: `loss`, `updates` (path -> float array: the gradient) and `sharded` (paths of parameters of which
        a device holds only a part).
    """
    results: list[dict[str, Any]] = ask(__name__, (model, batch, meshes, objective, microbatches or [1] * len(meshes)))
    return results


def ask(module: str, request: Any) -> Any:
    """What `python -m module` answers on eight CPU devices: a pickled request in, a pickled answer out."""
    env = dict(os.environ)
    env["JAX_PLATFORMS"] = "cpu"
    flags = [flag for flag in env.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    env["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={COUNT}"])
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, input=pickle.dumps(request), capture_output=True, env=env, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


def _serve() -> None:
    import math

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from axcore.testing.models import by_path
    from axcore.train import CrossEntropy, Learner, Optimizer, Schedule
    from axcore.train.step.program import program

    class Descent(Optimizer):
        """Gradients as they are, which it also keeps: a difference of parameters would be rounded."""

        def transformation(self, axes: Any) -> optax.GradientTransformation:
            return optax.trace(decay=0.0)

    class One(Schedule):
        def __call__(self, step: jax.Array, total_steps: jax.Array) -> jax.Array:
            return jnp.ones((), jnp.float32)

    learner = Learner.Config(optimizer=Descent.Config(), schedule=One(), clip_norm=None)
    model, batch, meshes, objective, microbatches = pickle.load(sys.stdin.buffer)
    results = []
    for mesh, parts in zip(meshes, microbatches, strict=True):
        count = math.prod(mesh.shape.values())
        layout = mesh.make(jax.devices()[:count])
        made = program(model, learner, layout, objective or CrossEntropy.Config(), parts)
        state = made.init(jnp.uint32(0))
        rows = jax.device_put(batch, jax.tree.map(lambda leaf: leaf.sharding, made.batch_shapes(batch)))
        new, metrics = made.compile_train(batch)(state, rows)
        moved = by_path(new.params)
        results.append(
            {
                "loss": float(metrics["loss"]),
                "updates": {path: np.asarray(leaf) for path, leaf in by_path(new.optimizer[1].trace).items()},
                "sharded": [
                    path for path, leaf in moved.items() if leaf.addressable_shards[0].data.shape != leaf.shape
                ],
            }
        )
    sys.stdout.buffer.write(pickle.dumps(results))


if __name__ == "__main__":
    _serve()
