"""The conformance suite of a feature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.config import Config, ConfigError, text
from axcore.module import Rngs, Tree, abstract, functional
from axcore.nn import Repeat, use_remat
from axcore.parallel import Mesh, Remat
from axcore.plugin import Feature, resolve, use
from axcore.testing.devices import steps
from axcore.testing.models import VOCAB_SIZE, Batch, by_path, loss_and_grads, objective, tiny_batch, tiny_model
from axcore.testing.offer import OfferSuite


class FeatureSuite(OfferSuite):
    """Checks of a feature. Subclass it in a test file and name the feature:

    ```python
    class TestRope(FeatureSuite):
        feature = "rope"
    ```

    Attributes:
        feature: the name of the feature, as in `axcore.use`.
        options: the options of the feature.
        changes_outputs: whether the feature changes the outputs of a freshly built model.
        zero_gradients: path suffixes of parameters whose gradient is zero in a freshly built model, such as one factor
            of a product whose other factor is 0.
        mixes_rows: whether the rows of a batch may influence each other, for example through a shared capacity.
        bfloat16_error: largest relative difference of the loss between bfloat16 and float32 activations.
    """

    kind = Feature
    feature: ClassVar[str]
    changes_outputs: ClassVar[bool] = True
    zero_gradients: ClassVar[tuple[str, ...]] = ()
    mixes_rows: ClassVar[bool] = False
    bfloat16_error: ClassVar[float] = 2e-2

    def __init_subclass__(cls) -> None:
        if "feature" in cls.__dict__:
            cls.name = cls.feature

    def model(self) -> Config:
        """The config that the feature is attached to. Override this method if `tiny_model` lacks a node that the
        feature requires."""
        return tiny_model()

    def attached(self) -> Config:
        """The config with the feature."""
        return ax.pipe(self.model(), use(self.feature, **self.options))

    config = attached

    @staticmethod
    def batch() -> Batch:
        """The batch that the model runs on."""
        return tiny_batch()

    def test_attaching_returns_a_changed_copy_of_the_config(self) -> None:
        before = self.model()
        kept = text(before)
        after = use(self.feature, **self.options)(before)
        assert after.diff(before)
        assert text(before) == kept

    def test_building_with_the_feature_does_not_affect_other_models(self) -> None:
        fn, shapes, _ = abstract(self.model())
        abstract(self.attached())
        again, shapes_again, _ = abstract(self.model())
        assert shapes == shapes_again
        assert fn.axes == again.axes
        assert fn.graphdef == again.graphdef

    def test_selecting_nothing_raises_a_config_error(self) -> None:
        if "where" not in inspect.signature(resolve(*self.found())).parameters:
            pytest.skip("the feature has no option 'where'")
        with pytest.raises(ConfigError):
            use(self.feature, **{**self.options, "where": "no.such.place"})(self.model())

    def test_loss_and_gradients_are_finite_under_jit(self) -> None:
        loss, grads = self._loss_and_grads(self.attached())
        assert np.isfinite(loss)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))

    def test_every_parameter_has_a_gradient(self) -> None:
        _, grads = self._loss_and_grads(self.attached())
        dead = [
            path for path, leaf in by_path(grads).items() if not np.any(leaf) and not path.endswith(self.zero_gradients)
        ]
        assert not dead, f"no gradient reaches {dead}"

    def test_outputs_change_as_declared(self) -> None:
        with_it, _ = self._loss_and_grads(self.attached())
        without, _ = self._loss_and_grads(self.model())
        unchanged = np.allclose(with_it, without, rtol=1e-6, atol=0)  # fusion may change the rounding
        assert unchanged != self.changes_outputs

    def test_unrolled_and_scanned_stacks_agree(self) -> None:
        self._agrees(functools.partial(_on_stacks, change=lambda cfg: ax.select(cfg, Repeat).set(unroll=2)))

    def test_remat_does_not_change_results(self) -> None:
        self._agrees(functools.partial(_on_stacks, change=lambda cfg: use_remat(cfg, Remat())))

    def test_a_deeper_model_can_be_trained(self) -> None:
        """A feature that edits layers by number must work for any number of layers."""
        cfg = use(self.feature, **self.options)(_on_stacks(self.model(), _twice_as_deep))
        fn, params, state = abstract(cfg)
        jax.eval_shape(jax.grad(lambda params: objective(fn, params, state, self.batch())), params)

    def test_bfloat16_is_close_to_float32(self) -> None:
        narrow = self.attached().set(dtypes=ax.DTypes(compute=jnp.bfloat16))
        found, grads = self._loss_and_grads(narrow)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
        np.testing.assert_allclose(found, self._loss_and_grads(self.attached())[0], rtol=self.bfloat16_error)

    def test_rows_of_a_batch_are_independent(self) -> None:
        if self.mixes_rows:
            pytest.skip("mixes_rows is True")
        fn, params, state = functional(self.attached().build(rngs=Rngs(0)))
        ids = self.batch()["inputs"]
        others = ids.at[1:].set((ids[1:] + 1) % VOCAB_SIZE)
        run = jax.jit(lambda ids: fn(params, state, ids, key=jax.random.key(2))[0][0])
        np.testing.assert_allclose(run(others)[0], run(ids)[0], rtol=1e-5, atol=1e-6)

    def test_vmap_agrees_with_single_examples(self) -> None:
        fn, params, state = functional(self.attached().build(rngs=Rngs(0)))
        batches = jax.tree.map(lambda x: jnp.stack([x, jnp.roll(x, 1, axis=1)]), self.batch())
        loss = functools.partial(objective, fn, params, state)
        mapped = jax.jit(jax.vmap(loss))(batches)
        single = jax.jit(loss)
        one_by_one = [single(jax.tree.map(lambda x, i=i: x[i], batches)) for i in range(2)]
        np.testing.assert_allclose(mapped, np.stack(one_by_one), rtol=1e-5)

    def test_paths_of_other_parameters_do_not_change(self) -> None:
        before, after = (set(by_path(abstract(cfg)[1])) for cfg in (self.model(), self.attached()))
        owners = {path.rpartition(".")[0] for path in after}
        lost = {path for path in before - after if path.rpartition(".")[0] in owners}
        assert not lost, f"checkpoints would break: layers that still exist have lost {sorted(lost)}"

    def test_initial_values_of_other_parameters_do_not_change(self) -> None:
        before, after = (by_path(functional(cfg.build(rngs=Rngs(0)))[1]) for cfg in (self.model(), self.attached()))
        moved = [
            path
            for path, value in before.items()
            if path in after and value.shape == after[path].shape and not np.array_equal(value, after[path])
        ]
        assert not moved, f"the same seed gives different initial values to {moved}; draw from rngs.at(NAME)"

    def test_eight_devices_agree_with_one(self) -> None:
        batch = jax.tree.map(lambda x: np.asarray(jnp.tile(x, (4, 1))), self.batch())
        one, eight = steps(
            self.attached(), batch, [Mesh(shape={"data": 1, "fsdp": 1}), Mesh(shape={"data": 2, "fsdp": 4})]
        )
        assert eight["sharded"], "no parameter is sharded; do the parameters declare logical axes?"
        np.testing.assert_allclose(eight["loss"], one["loss"], rtol=1e-5)
        for path, update in one["updates"].items():
            scale = np.abs(update).max()
            np.testing.assert_allclose(
                eight["updates"][path], update, rtol=1e-3, atol=1e-5 + 1e-4 * scale, err_msg=path
            )

    def _agrees(self, change: Callable[[Config], Config]) -> None:
        loss, grads = self._loss_and_grads(self.attached())
        other_loss, other_grads = self._loss_and_grads(change(self.attached()))
        np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
        for path, leaf in by_path(grads).items():
            scale = np.abs(leaf).max()
            np.testing.assert_allclose(
                by_path(other_grads)[path], leaf, rtol=1e-3, atol=1e-7 + 1e-4 * scale, err_msg=path
            )

    def _loss_and_grads(self, cfg: Config) -> tuple[np.ndarray, Tree]:
        return loss_and_grads(cfg, self.batch)


def _on_stacks(cfg: Config, change: Callable[[Config], Config]) -> Config:
    """`change(cfg)`, or `cfg` if it has no stacks."""
    try:
        return change(cfg)
    except ConfigError:
        return cfg


def _twice_as_deep(cfg: Config) -> Config:
    def deeper(_: str, node: Config) -> Config:
        return node.set(num_layers=2 * cast(Repeat.Config, node).num_layers)

    return ax.select(cfg, Repeat).map(deeper)
