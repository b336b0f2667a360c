"""Proves that a built variant has a feature and works.

`by_shapes` builds a variant with abstract shapes and checks the modules and the traced program. It is fast and runs for
every variant. `by_numbers` compiles and runs a training step. It is slower and runs for some variants.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.interpreters import partial_eval

from axcore.config import Config, get
from axcore.module import Functional, Tree, abstract, initializer
from axcore.train import Objective
from axcore_loc.places import Places

BATCH, SEQ = 2, 12
QUICK_COMPILE = {"xla_backend_optimization_level": 0}
NOISE = 0.05
"""Standard deviation of the parameters that are not matrices. Their mean is 1."""


@dataclasses.dataclass(frozen=True)
class Built:
    """A model with abstract shapes, and the program of its loss.

    Attributes:
        modules: path -> class of every module.
        program: the jaxpr of the training loss.
    """

    fn: Functional
    params: Tree
    state: Tree
    modules: dict[str, type]
    program: Any

    @property
    def names(self) -> list[str]:
        return paths(self.params)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The result of `by_shapes`.

    Attributes:
        new_parameters: paths of parameters that exist only with the feature.
        faults: evidence against the feature, as sentences. Empty if the proof succeeds.
    """

    new_parameters: tuple[str, ...]
    faults: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The result of `by_numbers`, with `faults` as in `Shapes`.

    Attributes:
        loss, loss_without: losses in nats with and without the feature, with equal values of shared parameters.
    """

    loss: float
    loss_without: float
    faults: tuple[str, ...]


def build(recipe: Any) -> Built:
    """Builds the shapes of a recipe's model and traces its loss."""
    fn, params, state = abstract(recipe.model, "model")
    modules = {".".join(map(str, path)): type(module) for path, module in nnx.iter_modules(fn.bind(params, state))}
    program = jax.make_jaxpr(lambda params, state: _objective(recipe, fn, params, state))(params, state)
    return Built(fn, params, state, modules, program)


def by_shapes(without: Built, having: Built, found: Places, cfg: Config) -> Shapes:
    """Compares the model built from `cfg`, a whole recipe, with the expected places."""
    faults = []
    inside = [path.removeprefix("model.") for path in found.brought if path.startswith("model.")]
    for path in inside:
        wanted = get(cfg, f"model.{path}").target
        if isinstance(wanted, type) and issubclass(wanted, nnx.Module) and having.modules.get(path) is not wanted:
            faults.append(f"{path} should be a {wanted.__name__} but is {having.modules.get(path)}")
    if not found.brought and not found.anchors:
        faults.append("nothing changed")
    touches_model = inside or any(path.startswith("model") for path in found.anchors)
    if touches_model and str(without.program) == str(having.program):
        faults.append("the program of the loss is the same without the feature")
    new = sorted(set(having.names) - set(without.names))
    _, used = partial_eval.dce_jaxpr(having.program.jaxpr, [True] * len(having.program.jaxpr.outvars))
    alive = dict(zip(having.names, used, strict=False))
    faults += [f"the loss does not depend on {path}" for path in new if not alive[path]]
    return Shapes(tuple(new), tuple(faults))


def by_numbers(before: Any, after: Any, shapes: Shapes, changes_model: bool) -> Numbers:
    """Runs a training step with the feature and one without it, on the same parameters.

    Args:
        before, after: whole recipes.
        changes_model: whether the feature changes the model. Otherwise it must change the training step.
    """
    much = Until.GRADIENTS if changes_model else Until.UPDATE
    ran, without = _step(after, much), _step(before, Until.LOSS if changes_model else much)
    faults = []
    if not np.isfinite(ran.loss):
        faults.append(f"the loss is {ran.loss}")
    faults += [
        f"the gradient of {path} is not finite" for path, leaf in ran.grads.items() if not np.isfinite(leaf).all()
    ]
    faults += [f"no gradient reaches {path}" for path in shapes.new_parameters if not np.any(ran.grads[path])]
    faults += [f"{path} is not finite after a step" for path, leaf in ran.moved.items() if not np.isfinite(leaf).all()]
    if changes_model and ran.loss == without.loss:
        faults.append("the loss is the same without the feature")
    if not changes_model and all(np.array_equal(leaf, without.moved[path]) for path, leaf in ran.moved.items()):
        faults.append("a step changes every parameter in the same way without the feature")
    return Numbers(ran.loss, without.loss, tuple(faults))


@dataclasses.dataclass(frozen=True)
class _Ran:
    """A training step: the loss, and by path the gradients and the updated parameters."""

    loss: float
    grads: dict[str, np.ndarray]
    moved: dict[str, np.ndarray]


class Until(enum.Enum):
    """How much of a training step to run. Later stages cost more compile time."""

    LOSS = enum.auto()
    GRADIENTS = enum.auto()
    UPDATE = enum.auto()


def _step(recipe: Any, until: Until) -> _Ran:
    """One training step of a recipe, up to the given stage."""
    fn, shapes, state = abstract(recipe.model, "model")
    learner = recipe.learner.build(fn.axes)
    params = jax.tree.map_with_path(_value, shapes, fn.axes)
    if jax.tree.leaves(state):  # rare: only layers with state need their initial values
        _, state = jax.jit(initializer(recipe.model), compiler_options=QUICK_COMPILE)(jax.random.key(0))

    def objective(params: Tree) -> jax.Array:
        return _objective(recipe, fn, params, state)

    def step(params: Tree) -> tuple[jax.Array, Tree, Tree]:
        if until is Until.LOSS:
            return objective(params), {}, {}
        loss, grads = jax.value_and_grad(objective)(params)
        if until is Until.GRADIENTS:
            return loss, grads, {}
        one, total = jnp.ones((), jnp.int32), jnp.full((), 10, jnp.int32)
        moved, _, _ = learner.update(grads, learner.init(params), params, one, total)
        return loss, grads, moved

    loss, grads, moved = jax.device_get(jax.jit(step, compiler_options=QUICK_COMPILE)(params))
    return _Ran(float(loss), _flat(grads), _flat(moved))


def _objective(recipe: Any, fn: Functional, params: Tree, state: Tree) -> jax.Array:
    """The training loss, including the losses that layers add."""
    objective: Objective = recipe.objective.build()
    return objective.value(fn, params, state, _batch(recipe.model), key=jax.random.key(0), training=True)


def _batch(model: Any) -> dict[str, jax.Array]:
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (BATCH, SEQ + 1), dtype=np.int32)
    weights = np.ones((BATCH, SEQ), np.float32)
    return {"inputs": jnp.asarray(ids[:, :-1]), "targets": jnp.asarray(ids[:, 1:]), "weights": jnp.asarray(weights)}


def _value(path: Any, shape: jax.ShapeDtypeStruct, axes: tuple[str | None, ...]) -> np.ndarray:
    """A value that depends only on the parameter's path, so that two models share equal parameters.

    Matrices preserve the scale of their inputs, and all other parameters are near one. No value is zero, since
    parameters that start at zero (a bias, the second half of LoRA) would hide what depends on them.
    """
    random = np.random.default_rng(zlib.crc32(_name(path).encode())).standard_normal(shape.shape)
    inputs = [size for size, axis in zip(shape.shape, axes, strict=True) if axis != "layer"][:-1]
    return np.asarray(random / math.sqrt(math.prod(inputs)) if inputs else 1 + NOISE * random).astype(shape.dtype)


def paths(tree: Tree) -> list[str]:
    """The dotted path of each leaf, in jax's order."""
    return [_name(path) for path, _ in jax.tree.leaves_with_path(tree)]


def _flat(tree: Tree) -> dict[str, np.ndarray]:
    return {_name(path): np.asarray(leaf, np.float32) for path, leaf in jax.tree.leaves_with_path(tree)}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
