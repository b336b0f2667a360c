"""The conformance suite of a feature."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import axcore as ax
from axcore.config import parse_text, text
from axcore.module import Rngs, abstract, functional
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.plugin import Feature, State, registry, use


def tiny_model() -> CausalLM.Config:
    """A causal language model that holds one of everything that features attach to."""
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=4, num_kv_heads=2), ffn=FeedForward.Config(hidden_dim=24)
    )
    return CausalLM.Config(vocab_size=32, dim=16, decoder=Repeat.Config(num_layers=2, layers=layer), z_loss=1e-3)


class FeatureSuite:
    """Checks that hold for every feature. Subclass it in a test file and name the feature:

    ```python
    class TestRope(FeatureSuite):
        feature = "rope"
    ```

    Attributes:
        feature: the name that `axcore.use` knows it by.
        options: for `axcore.use`.
        changes_outputs: whether a freshly built model computes something else with the feature than without.
    """

    feature: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    changes_outputs: ClassVar[bool] = True

    def model(self) -> Any:
        """The config that the feature is attached to; override it when `tiny_model` has nothing for it."""
        return tiny_model()

    def attached(self) -> Any:
        return ax.pipe(self.model(), use(self.feature, **self.options))

    @staticmethod
    def batch() -> dict[str, jax.Array]:
        """What the model is run on."""
        ids = jax.random.randint(jax.random.key(1), (2, 9), 0, 32)
        return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": jnp.ones((2, 8))}

    def test_plugin_is_loaded(self) -> None:
        found = registry().find(Feature, self.feature)
        assert found is not None, f"no installed plugin offers {self.feature!r}"
        assert found[0].state is State.LOADED

    def test_manifest_imports_neither_jax_nor_flax(self) -> None:
        plugin, _ = registry().find(Feature, self.feature) or (None, None)
        assert plugin is not None
        code = f"import {plugin.module}, sys, json; print(json.dumps([m for m in ('jax', 'flax') if m in sys.modules]))"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert json.loads(out) == []

    def test_attaching_changes_the_config_and_not_the_original(self) -> None:
        before = self.model()
        kept = text(before)
        after = use(self.feature, **self.options)(before)
        assert after.diff(before)
        assert text(before) == kept

    def test_text_form_reads_back(self) -> None:
        cfg = self.attached()
        assert text(cfg) == "".join(f"{path}: {value}\n" for path, value in parse_text(text(cfg)).items())

    def test_loss_and_gradients_are_finite_under_jit(self) -> None:
        loss, grads = self._loss_and_grads(self.attached())
        assert np.isfinite(loss)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))

    def test_every_parameter_has_a_gradient(self) -> None:
        _, grads = self._loss_and_grads(self.attached())
        dead = [jax.tree_util.keystr(path) for path, leaf in jax.tree.leaves_with_path(grads) if not np.any(leaf)]
        assert not dead, f"no gradient reaches {dead}"

    def test_outputs_change_as_declared(self) -> None:
        with_it, _ = self._loss_and_grads(self.attached())
        without, _ = self._loss_and_grads(self.model())
        assert (with_it != without) == self.changes_outputs

    def test_unrolled_and_scanned_stacks_agree(self) -> None:
        scanned = self.attached()
        unrolled = ax.select(scanned, Repeat).set(unroll=2)
        losses = [self._loss_and_grads(cfg)[0] for cfg in (scanned, unrolled)]
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)

    def test_paths_of_other_parameters_stay(self) -> None:
        before, after = (_paths(abstract(cfg)[1]) for cfg in (self.model(), self.attached()))
        owners = {path.rpartition(".")[0] for path in after}
        lost = {path for path in before - after if path.rpartition(".")[0] in owners}
        assert not lost, f"checkpoints would break: {sorted(lost)} have gone from layers that stayed"

    def _loss_and_grads(self, cfg: Any) -> tuple[np.ndarray, Any]:
        return _loss_and_grads(cfg, self.batch)


@functools.cache  # several checks look at the same model
def _loss_and_grads(cfg: Any, make_batch: Callable[[], dict[str, jax.Array]]) -> tuple[np.ndarray, Any]:
    """Loss and gradients of a freshly built model, as a training step computes them."""
    fn, params, state = functional(cfg.build(rngs=Rngs(0)))

    def objective(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        (loss, collections), _ = fn(params, state, batch, key=jax.random.key(2), training=True, method="loss")
        return loss + collections.total_loss()

    loss, grads = jax.jit(jax.value_and_grad(objective))(params, make_batch())
    return np.asarray(loss), jax.device_get(grads)


def _paths(params: Any) -> set[str]:
    return {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(params)}
