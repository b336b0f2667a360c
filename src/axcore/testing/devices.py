"""Training steps on eight CPU devices, in a separate process."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axcore.config import Config, ConfigError
from axcore.module import Tree
from axcore.parallel import Mesh
from axcore.testing.models import by_path
from axcore.testing.optimizer import Constant
from axcore.train import CrossEntropy, Learner, Optimizer, Trainer
from axcore.train.step.program import Metrics, Program, TrainState, program

COUNT = 8
"""Number of devices."""

_PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
"""XLA ends the process if the devices of a collective do not meet in time, by default in 40 s: too short for a busy
machine."""

_SERVE = """
import pickle, sys
function, args, kwargs = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.dumps(function(*args, **kwargs)))
"""

Arrays = Mapping[str, np.ndarray]
"""A batch."""


def on_devices[**P, R](function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `function(*args, **kwargs)` in a new process with eight CPU devices and returns the result.

    Args:
        function: a function that the new process can import. Arguments and result are pickled.
    """
    env = dict(os.environ)
    env["JAX_PLATFORMS"] = "cpu"
    given = [flag for flag in env.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    env["XLA_FLAGS"] = " ".join([_PATIENT, *given, f"--xla_force_host_platform_device_count={COUNT}"])
    # The size of XLA's thread pool. Each running collective blocks a thread, and programs run several at once: with the
    # default of one thread per device, the devices can wait for each other forever.
    env["NPROC"] = str(8 * COUNT)
    request = pickle.dumps((function, args, kwargs))
    done = subprocess.run([sys.executable, "-c", _SERVE], input=request, capture_output=True, env=env, check=False)
    assert done.returncode == 0, done.stderr.decode()
    result: R = pickle.loads(done.stdout)
    return result


class StepResult(TypedDict):
    """The result of one step of plain gradient descent."""

    loss: float
    updates: dict[str, np.ndarray]
    """Path -> the gradient of the parameter."""
    sharded: list[str]
    """Paths of the parameters that are sharded."""


def steps(
    model: Config,
    batch: Arrays,
    meshes: Sequence[Mesh],
    objective: Config | None = None,
    microbatches: Sequence[int] | None = None,
) -> list[StepResult]:
    """Runs one step of plain gradient descent on each mesh. A mesh may have a single device.

    Args:
        model: config of the model.
        batch: arrays of the batch.
        objective: config of the objective; None: cross-entropy.
        microbatches: number of microbatches on each mesh; None: 1.
    """
    return on_devices(_steps, model, batch, meshes, objective or CrossEntropy.Config(), microbatches)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One AdamW step on several devices, compared with the same step on one device.

    Attributes:
        metrics: name -> (value on several devices, value on one device).
        gradients, updates: path -> largest difference, relative to the largest value on one device. Updates exclude
            the rounding of the new parameter.
        zero_gradients: paths of parameters whose gradient is zero on one device; they are not compared.
        param_shards: path -> number of shards of the parameter.
        moment_shards: path -> number of shards of the moments.
        rows: number of rows of the batch, and number of rows on each device.
        mesh_error: the error of making the mesh with one device fewer than the config requires; empty if none.
    """

    metrics: dict[str, tuple[np.ndarray, np.ndarray]]
    gradients: dict[str, float]
    updates: dict[str, float]
    zero_gradients: list[str]
    param_shards: dict[str, int]
    moment_shards: dict[str, int]
    rows: tuple[int, int]
    mesh_error: str


class Case(NamedTuple):
    """A trainer on one device, the same trainer on several devices, and the batch of both."""

    single: Trainer.Config
    parallel: Trainer.Config
    batch: Arrays
    num_devices: int


def compare(cases: Mapping[str, Case]) -> dict[str, Comparison]:
    """Compares one step on several devices with the step on one device, for each case."""
    return on_devices(_compare_all, cases)


class _Descent(Optimizer):
    """Returns the gradients unchanged and stores them, since the difference of old and new parameters is rounded."""

    def transformation(self, axes: Tree) -> optax.GradientTransformation:
        return optax.trace(decay=0.0)


class _Step(NamedTuple):
    before: TrainState
    after: TrainState
    metrics: Metrics
    batch: dict[str, jax.Array]


def _run(made: Program, batch: Arrays, start: TrainState | None = None) -> _Step:
    """Runs one step, from the initial state of the program by default."""
    start = jax.device_get(made.init(jnp.uint32(0))) if start is None else start
    changed = by_path(made.state).keys() ^ by_path(start).keys()
    assert not changed, f"the layout changes the training state: {sorted(changed)}"
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (made.state, made.batch_shapes(batch)))
    state, rows = jax.device_put((start, dict(batch)), shardings)
    after, metrics = made.compile_train(batch)(state, rows)
    return _Step(start, after, metrics, rows)


def _steps(
    model: Config, batch: Arrays, meshes: Sequence[Mesh], objective: Config, microbatches: Sequence[int] | None
) -> list[StepResult]:
    learner = Learner.Config(optimizer=_Descent.Config(), schedule=Constant(rate=1.0), clip_norm=None)
    results: list[StepResult] = []
    for mesh, count in zip(meshes, microbatches or [1] * len(meshes), strict=True):
        layout = mesh.make(jax.devices()[: math.prod(mesh.shape.values())])
        step = _run(program(model, learner, layout, objective, count), batch)
        params = by_path(step.after.params)
        results.append(
            {
                "loss": float(step.metrics["loss"]),
                "updates": {path: np.asarray(leaf) for path, leaf in by_path(step.after.optimizer[1].trace).items()},
                "sharded": [path for path, leaf in params.items() if _shards(leaf) > 1],
            }
        )
    return results


def _compare_all(cases: Mapping[str, Case]) -> dict[str, Comparison]:
    steps: dict[tuple[Trainer.Config, int], _Step] = {}
    found = {}
    for name, case in cases.items():
        print(name, file=sys.stderr)  # which case runs, if XLA ends the process
        found[name] = _compare(case, steps)
    return found


def _compare(case: Case, steps: dict[tuple[Trainer.Config, int], _Step]) -> Comparison:
    """Compares one case. `steps` holds the steps on one device that earlier cases ran."""
    key = case.single, id(case.batch)
    if key not in steps:
        steps[key] = _run(_program(case.single, 1), case.batch)
    one = steps[key]
    several = _run(_program(case.parallel, case.num_devices), case.batch, one.before)
    old, new, expected = (_arrays(state.params) for state in (one.before, several.after, one.after))
    # The first moment of AdamW after one step from zero is `1 - b1` times the gradient.
    gradients, exact = _arrays(_adam(several).mu), _arrays(_adam(one).mu)
    compared = [path for path in exact if exact[path].any()]

    def update_error(path: str) -> float:
        rounding = np.finfo(old[path].dtype).eps * np.abs(old[path]).max()
        return _error(new[path] - old[path], expected[path] - old[path], rounding)

    mu, nu = (_shards_by_path(moment) for moment in (_adam(several).mu, _adam(several).nu))
    inputs = several.batch["inputs"]
    return Comparison(
        metrics={name: (np.asarray(several.metrics[name]), np.asarray(one.metrics[name])) for name in one.metrics},
        gradients={path: _error(gradients[path], exact[path]) for path in compared},
        updates={path: update_error(path) for path in compared},
        zero_gradients=[path for path in exact if path not in compared],
        param_shards=_shards_by_path(several.after.params),
        moment_shards={path: min(mu[path], nu[path]) for path in mu},
        rows=(inputs.shape[0], inputs.addressable_shards[0].data.shape[0]),
        mesh_error=_mesh_error(case.parallel.mesh, case.num_devices - 1),
    )


def _program(cfg: Trainer.Config, count: int) -> Program:
    return program(cfg.model, cfg.learner, cfg.mesh.make(jax.devices()[:count]), cfg.objective, cfg.microbatches)


def _adam(step: _Step) -> optax.ScaleByAdamState:
    leaves = jax.tree.leaves(step.after.optimizer, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    (state,) = (leaf for leaf in leaves if isinstance(leaf, optax.ScaleByAdamState))
    return state


def _mesh_error(mesh: Mesh, count: int) -> str:
    try:
        mesh.make(jax.devices()[:count])
    except ConfigError as error:
        return str(error)
    return ""


def _error(found: np.ndarray, expected: np.ndarray, rounding: float = 0.0) -> float:
    return float(max(np.abs(found - expected).max() - rounding, 0.0) / np.abs(expected).max())


def _arrays(tree: Tree) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in by_path(tree).items()}


def _shards(leaf: jax.Array) -> int:
    """The number of different shards of an array."""
    return leaf.size // leaf.addressable_shards[0].data.size


def _shards_by_path(tree: Tree) -> dict[str, int]:
    return {path: _shards(leaf) for path, leaf in by_path(tree).items()}
