"""The conformance suite of mesh rules and other changes of the layout."""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import numpy as np

import axcore as ax
from axcore.config import Config, flatten, text
from axcore.nn import use_remat
from axcore.parallel import Mesh, Remat
from axcore.plugin import Accelerator, MeshRule, Offer, use
from axcore.plugin.targets import bound
from axcore.testing import devices
from axcore.testing.devices import Case, Comparison, compare
from axcore.testing.models import OBJECTIVE, Batch, tiny_batch, tiny_model
from axcore.testing.offer import OfferSuite
from axcore.train import AdamW, Learner, Trainer, WarmupStableDecay
from axcore.train.run.identity import changes


class ParallelismSuite(OfferSuite):
    """Checks that a training step on several CPU devices equals the step on one. Subclass it in a test file:

    ```python
    class TestRule(ParallelismSuite):
        name = "gpu-h100"
        accelerator = "gpu-h100-8"
    ```

    For other kinds of offers, such as features, set `kind` to the class of the offer, or override `modify`.

    Attributes:
        accelerator: the accelerator that the mesh rule is applied to, with at most 8 devices.
        shards_parameters, shards_batch: whether the layout shards parameters and the batch.
        remat, packed, tied: whether the checks include remat, packed rows and a tied embedding.
        tolerance: largest error relative to the largest value of each array, in float32.
    """

    kind: ClassVar[type[Offer]] = MeshRule
    accelerator: ClassVar[str] = "cpu-8"
    shards_parameters: ClassVar[bool] = True
    shards_batch: ClassVar[bool] = True
    remat: ClassVar[bool] = True
    packed: ClassVar[bool] = True
    tied: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-5

    def model(self) -> Config:
        """The model. Its dimensions must be divisible by the number of devices."""
        return tiny_model()

    def modify(self, cfg: Trainer.Config) -> Trainer.Config:
        """Applies the mesh rule, or attaches the offer, to the config of a trainer."""
        plugin, offer = self.found()
        if not isinstance(offer, MeshRule):
            return ax.pipe(cfg, use(self.name, **self.options))
        new = bound(plugin, offer, Accelerator.parse(self.accelerator))(cfg)
        assert isinstance(new, Trainer.Config), "a mesh rule must return a Trainer.Config"
        return new

    def trainer(self) -> Trainer.Config:
        """The argument of `modify`: the config of a trainer without an input."""
        learner = Learner.Config(
            # With a small eps, the first update would be the sign of the gradient, which may be noise.
            optimizer=AdamW.Config(eps=1.0),
            schedule=WarmupStableDecay(peak=1.0, warmup_steps=1, decay=0.0),
        )
        return Trainer.Config(model=self.model(), objective=OBJECTIVE, learner=learner, steps=1)

    def config(self) -> Trainer.Config:
        return self.modify(self.trainer())

    def batch(self) -> Batch:
        """A batch with two rows for each device."""
        return tiny_batch(rows=2 * self._count())

    def test_the_rule_matches_the_accelerator(self) -> None:
        _, offer = self.found()
        count = self._count()
        assert 1 < count <= devices.COUNT, (
            f"{self.accelerator} has {count} devices; at least 2 and at most {devices.COUNT} are required"
        )
        if isinstance(offer, MeshRule):
            reason = offer.why_not(Accelerator.parse(self.accelerator), "")
            assert not reason, f"the rule does not apply to {self.accelerator}: {reason}"

    def test_modify_is_deterministic_and_returns_a_copy(self) -> None:
        before = self.trainer()
        kept = text(before)
        after = self.modify(before)
        assert after.diff(before), "modify returns the config unchanged"
        assert after == self.modify(before)
        assert text(before) == kept

    def test_modify_changes_only_the_layout(self) -> None:
        before, after = self.trainer(), self.modify(self.trainer())
        for name in ("steps", "minutes"):
            assert getattr(after, name) == getattr(before, name), f"modify must not change {name}"
        changed, _ = changes(flatten(before), after)
        assert not changed, f"modify must not change what the run computes:\n{changed}"

    def test_loss_and_metrics_equal_one_device(self) -> None:
        for case, found in self._compared().items():
            assert {"loss", "z_loss", "gradient_norm"} <= found.metrics.keys()
            for name, (several, one) in found.metrics.items():
                np.testing.assert_allclose(several, one, rtol=self.tolerance, err_msg=f"{case}: {name}")

    def test_gradients_equal_one_device(self) -> None:
        for case, found in self._compared().items():
            assert not found.zero_gradients, f"{case}: the gradients of {found.zero_gradients} are zero"
            wrong = {path: error for path, error in found.gradients.items() if not error <= self.tolerance}
            assert not wrong, f"{case}: relative errors of gradients {wrong}"

    def test_updates_equal_one_device(self) -> None:
        for case, found in self._compared().items():
            wrong = {path: error for path, error in found.updates.items() if not error <= self.tolerance}
            assert not wrong, f"{case}: relative errors of updates {wrong}"

    def test_parameters_and_optimizer_state_are_sharded(self) -> None:
        for case, found in self._compared().items():
            assert (max(found.param_shards.values()) > 1) == self.shards_parameters, f"{case}: {found.param_shards}"
            assert found.moment_shards == found.param_shards, f"{case}: moments must be sharded like their parameters"

    def test_the_batch_is_sharded(self) -> None:
        for case, found in self._compared().items():
            rows, local = found.rows
            assert (local < rows) == self.shards_batch, f"{case}: each device has {local} of {rows} rows"

    def test_too_few_devices_work_or_raise_a_mesh_error(self) -> None:
        for found in self._compared().values():
            assert not found.mesh_error or "mesh.shape" in found.mesh_error

    def _count(self) -> int:
        return Accelerator.parse(self.accelerator).count

    @classmethod
    @functools.cache  # several checks use the same steps
    def _compared(cls) -> dict[str, Comparison]:
        return compare(cls()._cases())

    def _cases(self) -> dict[str, Case]:
        plain, batch = self.trainer(), jax.device_get(self.batch())
        cases = {"plain": (plain, batch)}
        if self.remat or self.packed or self.tied:  # in one case, since each case compiles two steps
            cfg = use_remat(plain, Remat()) if self.remat else plain
            cfg = ax.select(cfg, "model.head").remove() if self.tied else cfg
            extras = {"remat": self.remat, "packed rows": self.packed, "a tied embedding": self.tied}
            name = f"with {', '.join(name for name, included in extras.items() if included)}"
            cases[name] = (cfg, _packed(batch) if self.packed else batch)
        one = Mesh(shape={"data": 1}, rules={})
        return {
            name: Case(cfg.set(mesh=one), self.modify(cfg), rows, self._count()) for name, (cfg, rows) in cases.items()
        }


def _packed(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The batch with several documents and padding of different lengths in each row."""
    random = np.random.default_rng(0)
    shape = batch["inputs"].shape
    segments = 1 + np.cumsum(random.random(shape) < 0.3, axis=1).astype(np.int32)
    starts = np.diff(segments, axis=1, prepend=0) > 0
    index = np.arange(shape[1], dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    padding = index >= random.integers(shape[1] // 2, shape[1] + 1, (shape[0], 1))
    empty = {"inputs": 0, "targets": 0, "weights": 0.0, "segment_ids": 0, "positions": 0}
    rows = batch | {"segment_ids": segments, "positions": positions}
    return {name: np.where(padding, empty[name], values).astype(values.dtype) for name, values in rows.items()}
