"""The training and evaluation steps: pure functions of arrays, compiled before the training loop starts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axcore.config import Config, ConfigError, under
from axcore.module import Functional, Tree, abstract, initializer, root
from axcore.module.context import MissingKey
from axcore.nn.attention.heads import check_heads
from axcore.parallel import CompilerOptions, Layout, checked_options
from axcore.parallel.compiler_options import Value
from axcore.parallel.remat import check_kinds, checked_tags
from axcore.train.step.accumulation import ObjectiveGradient
from axcore.train.step.data_shards import data_shard
from axcore.train.step.learner import Learner
from axcore.train.step.nan import checked
from axcore.train.step.objective import CrossEntropy, Objective
from axcore.train.step.pipeline import PipelinedStack, check_permutes, pipelined, pipelined_stack
from axcore.train.step.placement import moment_shardings, on_devices, optimizer_shardings
from axcore.train.step.subtrees import like_params, union

Metrics = dict[str, jax.Array]
NEXT_TOKEN = CrossEntropy.Config()
UNKNOWN_STEPS = 2**31 - 1
"""`total_steps` of a run whose length is not yet known."""


_QUICK_COMPILE = {"xla_backend_optimization_level": 0}
"""Compiler options for functions that run once, such as initialization: optimizing them would take longer than running
them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Everything that a step changes, as nested dicts of arrays, which are cheap to dispatch and easy to save.

    Attributes:
        params: the model's parameters.
        model_state: the model's other Variables, such as running statistics.
        optimizer: the optax state.
        step: int32 scalar, steps done.
        total_steps: int32 scalar, the length of the run.
        seed: uint32 scalar. The PRNG key of each step derives from it and `step`.
        callbacks: the arrays that callbacks keep on the devices, by name.
    """

    params: Tree
    model_state: Tree
    optimizer: optax.OptState
    step: jax.Array
    total_steps: jax.Array
    seed: jax.Array
    callbacks: dict[str, Tree] = dataclasses.field(default_factory=dict)


TrainStep = Callable[[TrainState, Mapping[str, Any]], tuple[TrainState, Metrics]]
EvalStep = Callable[[Tree, Tree, Mapping[str, Any]], tuple[jax.Array, jax.Array]]


class DeviceState(Protocol):
    """The part of a callback that runs in the training step; see `axcore.train.Callback`."""

    def device_init(self, params: Tree) -> Tree: ...

    def device_update(self, state: Tree, params: Tree, step: jax.Array) -> Tree: ...


@dataclasses.dataclass(frozen=True)
class Program:
    """The uncompiled steps of one model, objective, learner and layout."""

    fn: Functional
    objective: Objective
    learner: Learner
    layout: Layout
    state: TrainState
    """Shapes and shardings of the state."""
    moments: Tree
    """Shape, dtype and sharding of each parameter, as the optimizer updates it; see `moment_shardings`."""
    init: Callable[[jax.Array | np.ndarray], TrainState]
    """Jitted function from the seed to the first state, sharded."""
    start: Callable[[Tree, Tree, jax.Array | np.ndarray], TrainState]
    """Jitted function from parameters, other Variables and the seed to the first state. It donates the first two."""
    start_callbacks: Callable[[Tree], dict[str, Tree]]
    """Jitted function from the parameters to the first arrays of each callback, sharded."""
    callbacks: Mapping[str, DeviceState] = dataclasses.field(default_factory=dict)
    microbatches: int = 1
    compiler_options: dict[str, Value] = dataclasses.field(default_factory=dict)
    """Options for compiling both steps, accepted by the compiler."""
    stack: PipelinedStack | None = None
    """The layers that are divided into pipeline stages; None without stages."""

    def train_step(self, state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Metrics]:
        """Returns the new state and the metrics, which are scalars, or [layer] for summaries of a scanned stack."""
        key = jax.random.fold_in(jax.random.key(state.seed), state.step)
        trained, frozen = self.learner.trained(state.params), self.learner.frozen(state.params)
        params_like, updated = self.learner.trained(self.state.params), self.learner.trained(self.moments)
        sums_like = updated if self.layout.zero == 2 else params_like
        gradient = ObjectiveGradient(self.fn, self.objective, self.layout, trained, frozen, params_like, sums_like)
        with self.layout.active():
            if self.stack is not None:
                found = pipelined(gradient, self.stack, state.model_state, batch, key, self.microbatches)
            elif self.microbatches == 1:
                found = gradient.whole(state.model_state, batch, key)
            else:
                found = gradient.accumulated(state.model_state, batch, key, self.microbatches)
        grads = found.grads
        if self.layout.zero:
            grads = jax.lax.with_sharding_constraint(grads, jax.tree.map(lambda form: form.sharding, updated))
        with jax.named_scope("learner"), root(None, key=key, training=True, names=("learner",)) as frame:
            grads, moments = on_devices(grads, state.optimizer, self.state.optimizer)
            params, optimizer, metrics = self.learner.update(
                grads, moments, state.params, state.step, state.total_steps
            )
        assert frame.collections is not None
        if frame.collections.losses:
            raise ConfigError(
                f"{', '.join(frame.collections.losses)}: the learner adds a loss after the gradient is computed, "
                f"which has no effect. Add it in the model or in the objective."
            )
        collections = found.collections
        reported = {**collections.weighted_losses(), **collections.scalars(), **frame.collections.scalars()}
        if taken := reported.keys() & {"loss", *metrics}:
            raise ConfigError(
                f"the model reports {', '.join(sorted(taken))}, which the trainer reports itself. Use another name."
            )
        metrics = {"loss": found.loss.mean(), **metrics, **reported}
        model_state = union(found.model_state, found.gradient_state)
        done = state.step + 1
        kept = {name: self.callbacks[name].device_update(own, params, done) for name, own in state.callbacks.items()}
        return TrainState(params, model_state, optimizer, done, state.total_steps, state.seed, kept), metrics

    def eval_step(self, params: Tree, model_state: Tree, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """(total, count) of the objective, without auxiliary losses."""
        with self.layout.active():
            (loss, _), _ = self.fn(params, model_state, batch, method=self.objective)
        return loss.total, loss.count

    def random_layer(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> str | None:
        """A layer that draws random numbers in training steps on batches of these shapes; None if no layer does."""
        step = functools.partial(self.fn, method=self.objective, training=True)
        with self.layout.active():
            try:
                jax.eval_shape(step, self.state.params, self.state.model_state, self.batch_shapes(batch))
            except MissingKey as error:
                return error.layer
        return None

    def batch_shapes(self, batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and shardings of batches like this one, whose arrays are [batch, seq, ...] or [batch].

        Raises:
            ConfigError: the rows cannot be divided evenly into microbatches and over devices, or the tokens over
            devices.
        """
        return {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding(x.shape)) for name, x in batch.items()
        }

    def _sharding(self, shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
        """The sharding of a batch array of this shape."""
        names = ("batch", "seq")[: len(shape)]
        sharding = self.layout.sharding(*names)
        rows, *tokens = (self.layout.size_of(axes) for axes in sharding.spec)
        if shape[0] % (rows * self.microbatches):
            into = f"into microbatches={self.microbatches} and " if self.microbatches > 1 else ""
            raise ConfigError(
                f"input.batch_size={shape[0]} cannot be split evenly {into}over the {rows} devices that mesh.rules "
                f"assign to 'batch'. Make it a multiple of {rows * self.microbatches}"
                f"{_fewer(shape[0], rows, self.microbatches)}."
            )
        if tokens and shape[1] % tokens[0]:
            raise ConfigError(
                f"input.seq_len={shape[1]} cannot be split evenly over the {tokens[0]} devices that mesh.rules assign "
                f"to 'seq'. Make it a multiple of {tokens[0]}."
            )
        return sharding

    def compile_train(self, batch: Mapping[str, Any], traced: jax.stages.Traced | None = None) -> TrainStep:
        """The compiled training step for global batches of these shapes. It donates the state.

        With `jax_disable_jit` the step is not compiled. With `jax_debug_nans` a NaN raises an error that names the
        layer.

        Args:
            traced: the result of `trace_train`, if the step is already traced.
        """
        if jax.config.jax_disable_jit:
            run: TrainStep = self.train_step
        else:
            run = self.lower_train(batch, traced).compile(self.compiler_options)
        return checked(self.train_step, run) if jax.config.jax_debug_nans else run

    def trace_train(self, batch: Mapping[str, Any]) -> jax.stages.Traced:
        """The training step, traced for global batches of these shapes.

        Raises:
            ConfigError: `ByTag` names a tag that no value has, or a stage of a pipeline runs a collective-permute.
        """
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        step = jax.jit(self.train_step, donate_argnums=0, out_shardings=(shardings, self.layout.sharding()))
        with checked_tags():
            traced = step.trace(self.state, self.batch_shapes(batch))
        if self.stack is not None:
            check_permutes(traced.jaxpr, self.layout)
        return traced

    def lower_train(self, batch: Mapping[str, Any], traced: jax.stages.Traced | None = None) -> jax.stages.Lowered:
        """The training step, lowered for the layout's platform, which need not be available here."""
        traced = traced or self.trace_train(batch)
        if isinstance(self.layout.mesh, jax.sharding.AbstractMesh):  # its mesh has no devices to take the platform from
            return traced.lower(lowering_platforms=(self.layout.platform,))
        return traced.lower()

    def compile_eval(self, batch: Mapping[str, Any]) -> EvalStep:
        """The compiled evaluation step for global batches of these shapes; see `compile_train`."""
        if jax.config.jax_disable_jit:
            run: EvalStep = self.eval_step
        else:
            step = jax.jit(self.eval_step, out_shardings=self.layout.sharding())
            lowered = step.lower(self.state.params, self.state.model_state, self.batch_shapes(batch))
            run = lowered.compile(self.compiler_options)
        return checked(self.eval_step, run) if jax.config.jax_debug_nans else run

    def place(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The global batch, given the rows that this process reads; see `data_shard`."""
        if jax.process_count() == 1:
            return batch
        index, count = data_shard(self.layout)

        def whole(rows: np.ndarray) -> jax.Array:
            first = index * rows.shape[0]

            def shard(where: tuple[slice, ...] | None) -> np.ndarray:
                assert where is not None  # as for arrays with a dimension
                start, stop, _ = where[0].indices(rows.shape[0] * count)
                return rows[(slice(start - first, stop - first), *where[1:])]

            sharding = self.layout.sharding(*("batch", "seq")[: rows.ndim])
            return jax.make_array_from_callback((rows.shape[0] * count, *rows.shape[1:]), sharding, shard)

        return {name: whole(np.asarray(rows)) for name, rows in batch.items()}


def _fewer(batch_size: int, shards: int, microbatches: int) -> str:
    """The largest number of microbatches that fits, as advice; empty if there is none."""
    most = batch_size // shards
    if microbatches == 1 or batch_size % shards or not most:
        return ""
    return f", or set microbatches={max(n for n in range(1, microbatches) if most % n == 0)}"


def _check_trainable(trained: Tree) -> None:
    """Raises unless every trained parameter has a dtype with gradients. Codes of stored weights have none."""
    leaves = jax.tree.leaves_with_path(trained)
    forms = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.dtype for path, leaf in leaves}
    codes = [path for path, dtype in forms.items() if not jnp.issubdtype(dtype, jnp.inexact) or dtype.itemsize == 1]
    if codes:
        raise ConfigError(
            f"model.{codes[0]}: {forms[codes[0]]} parameters, such as stored weights, cannot be trained. Train the "
            f"model with float weights, or freeze the stored ones with learner.rates={{'**.weight.*': 0.0}}"
        )


def program(
    model: Config,
    learner: Config,
    layout: Layout,
    objective: Config = NEXT_TOKEN,
    microbatches: int = 1,
    callbacks: Mapping[str, DeviceState] | None = None,
    compiler_options: CompilerOptions | None = None,
) -> Program:
    """Builds the steps with abstract shapes and computes no arrays.

    Args:
        callbacks: the callbacks that may keep arrays on the devices, by name.
        compiler_options: options for compiling both steps.

    Raises:
        ConfigError: a mesh rule names a logical axis that the model lacks, a parameter or the heads of an attention
            layer cannot be sharded evenly, a remat policy names a class of layer that the model lacks, or the compiler
            rejects an option.
    """
    check_kinds(model, "model")
    check_heads(model, layout, "model")
    fn, params, model_state = abstract(model, "model")
    layout.check_rules(fn.logical_axes)
    layout.check_parameters(
        jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(params)
    )
    options = checked_options(compiler_options or {}, layout)
    stack = pipelined_stack(model, layout, microbatches)
    built_learner: Learner = learner.build(fn.axes)
    _check_trainable(built_learner.trained(params))
    with under("objective"):
        built_objective: Objective = objective.build()
    init_model = initializer(model)

    def init(seed: jax.Array) -> TrainState:
        return start(*init_model(jax.random.key(seed)), seed)

    def start(params: Tree, model_state: Tree, seed: jax.Array) -> TrainState:
        zero, total = jnp.zeros((), jnp.int32), jnp.full((), UNKNOWN_STEPS, jnp.int32)
        return TrainState(params, model_state, built_learner.init(params), zero, total, seed, start_callbacks(params))

    def start_callbacks(params: Tree) -> dict[str, Tree]:
        made = {name: callback.device_init(params) for name, callback in (callbacks or {}).items()}
        return {name: tree for name, tree in made.items() if tree}

    shapes = jax.eval_shape(init, jax.ShapeDtypeStruct((), jnp.uint32))
    axes, state_axes = (fn.axes, fn.state_axes) if stack is None else map(stack.axes, (fn.axes, fn.state_axes))
    param_shardings = layout.shardings(params, axes)
    moments = moment_shardings(layout, params, param_shardings)
    everywhere = layout.sharding()

    shardings: Any = TrainState(
        params=param_shardings,
        model_state=layout.shardings(model_state, state_axes),
        optimizer=optimizer_shardings(layout, shapes.optimizer, params, moments),
        step=everywhere,  # type: ignore[arg-type]
        total_steps=everywhere,  # type: ignore[arg-type]
        seed=everywhere,  # type: ignore[arg-type]
        callbacks=like_params(shapes.callbacks, params, param_shardings, everywhere),
    )

    def form(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    jit_options = {"out_shardings": shardings, "compiler_options": _QUICK_COMPILE}
    return Program(
        fn=fn,
        objective=built_objective,
        learner=built_learner,
        layout=layout,
        state=jax.tree.map(form, shapes, shardings),
        moments=jax.tree.map(form, params, moments),
        init=jax.jit(init, **jit_options),
        start=jax.jit(start, donate_argnums=(0, 1), **jit_options),
        start_callbacks=jax.jit(start_callbacks, out_shardings=shardings.callbacks),
        callbacks=callbacks or {},
        microbatches=microbatches,
        compiler_options=options,
        stack=stack,
    )
