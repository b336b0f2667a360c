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
from axcore.config import Config, ConfigError, text, walk
from axcore.config.select import builds
from axcore.module import Rngs, Tree, abstract, functional
from axcore.nn import Repeat, by_layer, use_remat
from axcore.parallel import Mesh, Remat
from axcore.plugin import Feature, resolve, use
from axcore.testing.causality import check_causality, check_decoding, check_documents, forward
from axcore.testing.declared import check_declared
from axcore.testing.devices import steps
from axcore.testing.models import (
    VOCAB_SIZE,
    Batch,
    by_path,
    loss_and_grads,
    objective,
    tiny_batch,
    tiny_model,
    without_axes,
)
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
        causal: whether the logits of a token do not depend on later tokens.
        separates_documents: whether the documents of a packed row do not influence each other.
        decodes: whether a model with the feature can be decoded with a KV cache.
        replaces: patterns, such as `decoder.*.ffn.*`, of parameters that the feature removes, renames or reshapes.
            Parameters are named by the number of their layer, as in `decoder.0.ffn.up.weight` (see
            `axcore.nn.by_layer`). Checkpoints of the model without the feature do not fit these.
        changes_initialization: patterns of the other parameters to which the same seed gives other initial values.
        replicated: patterns of the paths of new matrices without logical axes, which every device holds whole.
        bfloat16_error: largest relative difference of the loss between bfloat16 and float32 activations. Gradients may
            differ by ten times as much.
    """

    kind = Feature
    feature: ClassVar[str]
    changes_outputs: ClassVar[bool] = True
    zero_gradients: ClassVar[tuple[str, ...]] = ()
    mixes_rows: ClassVar[bool] = False
    causal: ClassVar[bool] = True
    separates_documents: ClassVar[bool] = True
    decodes: ClassVar[bool] = True
    replaces: ClassVar[tuple[str, ...]] = ()
    changes_initialization: ClassVar[tuple[str, ...]] = ()
    replicated: ClassVar[tuple[str, ...]] = ()
    bfloat16_error: ClassVar[float] = 2e-2

    def __init_subclass__(cls) -> None:
        if "feature" in cls.__dict__:
            cls.name = cls.feature

    def model(self) -> Config:
        """The config that the feature is attached to: `tiny_model` with four layers. Override this method if it lacks a
        node that the feature requires."""
        return ax.select(tiny_model(), Repeat).set(num_layers=4)

    def attach(self, cfg: Config) -> Config:
        """The config `cfg` with the feature."""
        return ax.pipe(cfg, use(self.feature, **self.options))

    def attached(self) -> Config:
        """The config of `model` with the feature."""
        return self.attach(self.model())

    config = attached

    @staticmethod
    def batch() -> Batch:
        """The batch that the model runs on."""
        return tiny_batch()

    def test_attaching_returns_a_changed_copy_of_the_config(self) -> None:
        before = self.model()
        kept = text(before)
        after = self.attach(before)
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
        assert np.isfinite(loss), f"the loss is {loss}"
        _check_finite(grads)

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
        assert unchanged != self.changes_outputs, (
            f"the loss is {with_it} with the feature and {without} without it; changes_outputs is "
            f"{self.changes_outputs}"
        )

    def test_later_tokens_do_not_change_logits(self) -> None:
        if not self.causal:
            pytest.skip("causal is False")
        check_causality(self.attached(), self.batch()["inputs"], VOCAB_SIZE)

    def test_documents_of_a_row_are_independent(self) -> None:
        if not self.separates_documents or not self.causal:
            pytest.skip("separates_documents or causal is False")
        check_documents(self.attached(), self.batch()["inputs"], length=3)

    def test_decoding_equals_recomputation(self) -> None:
        if not self.decodes or not self.causal:
            pytest.skip("decodes or causal is False")
        check_decoding(self.attached(), self.batch()["inputs"])

    def test_unrolled_and_scanned_stacks_agree(self) -> None:
        self._agrees(lambda cfg: ax.select(cfg, Repeat).set(unroll=2))

    def test_remat_does_not_change_results(self) -> None:
        self._agrees(lambda cfg: use_remat(cfg, Remat()))

    def test_a_deeper_model_can_be_trained(self) -> None:
        """A feature that edits layers by number must work for any number of layers."""
        cfg = self.attach(_twice_as_deep(self.model()))
        fn, params, state = abstract(cfg)
        jax.eval_shape(jax.grad(lambda params: objective(fn, params, state, self.batch())), params)

    def test_bfloat16_is_close_to_float32(self) -> None:
        narrow = self.attached().set(dtypes=ax.DTypes(compute=jnp.bfloat16))
        found, grads = self._loss_and_grads(narrow)
        loss, exact = self._loss_and_grads(self.attached())
        _check_finite(grads)
        np.testing.assert_allclose(found, loss, rtol=self.bfloat16_error)
        whole = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(exact)))
        for path, leaf in by_path(exact).items():
            error, size = np.linalg.norm(by_path(grads)[path] - leaf), np.linalg.norm(leaf)
            assert error <= 10 * self.bfloat16_error * (size + 0.05 * whole), (
                f"{path}: the error of the gradient in bfloat16 is {error:.2e}; its norm is {size:.2e}"
            )

    def test_rows_of_a_batch_are_independent(self) -> None:
        if self.mixes_rows:
            pytest.skip("mixes_rows is True")
        run, ids = forward(self.attached()), self.batch()["inputs"]
        others = ids.at[1:].set((ids[1:] + 1) % VOCAB_SIZE)
        np.testing.assert_allclose(run(others)[0], run(ids)[0], rtol=1e-5, atol=1e-5)

    def test_vmap_agrees_with_single_examples(self) -> None:
        fn, params, state = functional(self.attached().build(rngs=Rngs(0)))
        batches = jax.tree.map(lambda x: jnp.stack([x, jnp.roll(x, 1, axis=1)]), self.batch())
        loss = functools.partial(objective, fn, params, state)
        mapped = jax.jit(jax.vmap(loss))(batches)
        single = jax.jit(loss)
        one_by_one = [single(jax.tree.map(lambda x, i=i: x[i], batches)) for i in range(2)]
        np.testing.assert_allclose(mapped, np.stack(one_by_one), rtol=1e-5)

    def test_names_and_shapes_of_other_parameters_do_not_change(self) -> None:
        before, after = self._parameters()
        lost = [name for name, value in before.items() if name not in after or value.shape != after[name].shape]
        check_declared("replaces", self.replaces, lost, "the model with the feature has no such parameters")

    def test_initial_values_of_other_parameters_do_not_change(self) -> None:
        before, after = self._parameters()
        kept = {name: value for name, value in before.items() if name in after and value.shape == after[name].shape}
        moved = [name for name, value in kept.items() if not np.array_equal(value, after[name])]
        consequence = (
            "the same seed gives different initial values. Draw from rngs.at(NAME), unless the feature moves layers to "
            "other paths, as edit_layers does"
        )
        check_declared("changes_initialization", self.changes_initialization, moved, consequence)

    def test_new_matrices_have_logical_axes(self) -> None:
        fn, params, _ = abstract(self.attached())
        old = by_path(abstract(self.model())[1])
        bare = [path for path in without_axes(params, fn.axes) if path not in old]
        check_declared("replicated", self.replicated, bare, "matrices without logical axes cannot be sharded")

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
        try:
            changed = change(self.attached())
        except ConfigError as error:
            pytest.skip(f"the model has no stack: {error}")
        loss, grads = self._loss_and_grads(self.attached())
        other_loss, other_grads = self._loss_and_grads(changed)
        np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
        for path, leaf in by_path(grads).items():
            scale = np.abs(leaf).max()
            np.testing.assert_allclose(
                by_path(other_grads)[path], leaf, rtol=1e-3, atol=1e-7 + 1e-4 * scale, err_msg=path
            )

    def _loss_and_grads(self, cfg: Config) -> tuple[np.ndarray, Tree]:
        return loss_and_grads(cfg, self.batch)

    def _parameters(self) -> list[dict[str, np.ndarray]]:
        """The initial parameters without and with the feature, named by the number of their layer."""
        return [_by_layer(cfg) for cfg in (self.model(), self.attached())]


@functools.cache
def _by_layer(cfg: Config) -> dict[str, np.ndarray]:
    params = by_path(jax.device_get(functional(cfg.build(rngs=Rngs(0)))[1]))
    return {name: params[path][index] for name, (path, index) in by_layer(cfg, params).items()}


def _check_finite(grads: Tree) -> None:
    bad = [path for path, leaf in by_path(grads).items() if not np.isfinite(leaf).all()]
    assert not bad, f"the gradients of {bad} contain NaN or infinities"


def _twice_as_deep(cfg: Config) -> Config:
    """Doubles the number of layers of every `Repeat`."""

    def deeper(_: str, node: Config) -> Config:
        return node.set(num_layers=2 * cast(Repeat.Config, node).num_layers)

    return ax.select(cfg, Repeat).map(deeper) if any(builds(node, Repeat) for _, node in walk(cfg)) else cfg
