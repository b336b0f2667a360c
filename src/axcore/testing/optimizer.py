"""The conformance suite of an optimizer."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import axcore as ax
from axcore import train
from axcore.config import Config
from axcore.module import Rngs, Tree, abstract, functional
from axcore.nn import Linear
from axcore.plugin import OptimizerOffer
from axcore.testing.declared import check_declared
from axcore.testing.models import by_path, objective, tiny_batch, tiny_model
from axcore.testing.offer import OfferSuite, offered_config
from axcore.train import Learner, Schedule
from axcore.train.step.subtrees import like_params


class Constant(Schedule):
    """The same learning rate in every step."""

    rate: ax.NonNegativeFloat = 1e-2

    def __call__(self, step: Int[Array, ""], total_steps: Int[Array, ""]) -> Float[Array, ""]:
        return jnp.full((), self.rate, jnp.float32)


class OptimizerSuite(OfferSuite):
    """Checks of an optimizer.

    Attributes:
        rate: a learning rate that reduces the loss of a small model.
        steps: number of steps in which the loss of a small model must fall by 10%.
        replicated: patterns of the paths of optimizer state that every device holds whole, since it does not have the
            shape of its parameter, such as `*.factors.*`.
    """

    kind = OptimizerOffer
    rate: ClassVar[float] = 1e-2
    steps: ClassVar[int] = 20
    replicated: ClassVar[tuple[str, ...]] = ()

    def optimizer(self) -> Config:
        """The config of the optimizer."""
        return offered_config(self)

    def config(self) -> Learner.Config:
        optimizer = self.optimizer()
        assert isinstance(optimizer, train.Optimizer.Config)
        return Learner.Config(optimizer=optimizer, schedule=Constant(rate=self.rate))

    def test_the_loss_falls(self) -> None:
        fn, params, state = functional(tiny_model().build(rngs=Rngs(0)))
        learner: Learner = self.config().build(fn.axes)
        batch, optimizer_state = tiny_batch(), learner.init(params)

        @jax.jit
        def step(
            params: Tree, optimizer_state: optax.OptState, number: jax.Array
        ) -> tuple[Tree, optax.OptState, jax.Array]:
            loss, grads = jax.value_and_grad(lambda params: objective(fn, params, state, batch))(params)
            params, optimizer_state, _ = learner.update(grads, optimizer_state, params, number, jnp.int32(self.steps))
            return params, optimizer_state, loss

        losses = []
        for number in range(self.steps):
            params, optimizer_state, loss = step(params, optimizer_state, jnp.int32(number))
            losses.append(float(loss))
        assert np.isfinite(losses).all()
        assert losses[-1] < 0.9 * losses[0], losses
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))

    def test_stacked_parameters_are_updated_like_separate_ones(self) -> None:
        optimizer = self.optimizer().build()
        random = np.random.default_rng(0)
        axes: Tree = {"weight": ("embed", "mlp"), "scale": ("embed",), "bias": (None,)}
        shapes = {"weight": (8, 6), "scale": (8,), "bias": (5,)}

        def stacked() -> dict[str, jax.Array]:
            return {name: jnp.asarray(random.normal(size=(3, *shape)), jnp.float32) for name, shape in shapes.items()}

        params, grads = stacked(), stacked()
        together = self._update(optimizer, params, grads, {name: ("layer", *own) for name, own in axes.items()})
        for index in range(3):
            own, own_grads = ({name: array[index] for name, array in tree.items()} for tree in (params, grads))
            for name, update in self._update(optimizer, own, own_grads, axes).items():
                np.testing.assert_allclose(together[name][index], update, rtol=1e-4, atol=1e-5, err_msg=name)

    def test_state_is_sharded_like_the_parameters(self) -> None:
        """An array that has the shape of its parameter is sharded like it; every device holds the whole of others."""
        fn, params, _ = abstract(Linear.Config(input_dim=6, output_dim=4, use_bias=True))
        state = jax.eval_shape(self.optimizer().build().transformation(fn.axes).init, params)
        sharded = by_path(like_params(state, params, jax.tree.map(lambda _: True, params), False))
        whole = [path for path, leaf in by_path(state).items() if leaf.ndim and not sharded[path]]
        check_declared("replicated", self.replicated, whole, "optimizer state that is not sharded like its parameter")

    def test_zero_and_large_gradients_give_finite_updates(self) -> None:
        optimizer = self.optimizer().build()
        params, axes = {"weight": jnp.ones((8, 6))}, {"weight": ("embed", "mlp")}
        for size in (0.0, 1e-20, 1e15):
            found = self._update(optimizer, params, {"weight": jnp.full((8, 6), size)}, axes)
            assert np.isfinite(found["weight"]).all(), f"gradients of {size}"

    def test_use_sets_the_optimizer_of_the_learner(self) -> None:
        cfg = ax.use(self.name, **self.options)(Learner.Config())
        assert cfg.optimizer == self.optimizer()

    @staticmethod
    def _update(optimizer: train.Optimizer, params: Tree, grads: Tree, axes: Tree) -> Tree:
        transformation = optimizer.transformation(axes)
        updates, _ = jax.jit(transformation.update)(grads, transformation.init(params), params)
        assert by_path(updates).keys() == by_path(params).keys()
        found: Tree = updates
        return found
