"""The conformance suite of what lays a config out over devices."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import numpy as np

import axcore as ax
from axcore.config import Config, text
from axcore.module import abstract
from axcore.nn import use_remat
from axcore.parallel import Mesh, Remat
from axcore.plugin import Accelerator, MeshRule, Offer, use
from axcore.plugin.targets import bound
from axcore.testing import devices
from axcore.testing.models import OBJECTIVE, Batch, tiny_batch, tiny_model
from axcore.testing.offer import OfferSuite
from axcore.testing.sharded_step import Compared, compare
from axcore.train import AdamW, Learner, Trainer, WarmupStableDecay


class ParallelismSuite(OfferSuite):
    """One training step on fake CPU devices gives what it gives on one. Subclass it in a test file:

    ```python
    class TestRule(ParallelismSuite):
        name = "gpu-h100"
        accelerator = "gpu-h100-8"
    ```

    A strategy that is no mesh rule sets `kind` to the class of its offer (a feature, say), or overrides `modify`.

    Attributes:
        accelerator: what a mesh rule is asked for; its devices, 8 at most, are made of CPU.
        shards_parameters, shards_batch: what the layout spreads over devices.
        remat, packed, tied: whether it works with recomputation, with rows of several documents, and with an embedding
            that is also the head.
        tolerance: relative to the largest value of each array, in float32.
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
        """The model that is laid out; its dimensions must divide over the devices."""
        return tiny_model()

    def modify(self, cfg: Any) -> Any:
        """Lays a trainer's config out over the devices."""
        if self.kind is not MeshRule:
            return use(self.name, **self.options)(cfg)
        return ax.pipe(cfg, bound(*self.found(), Accelerator.parse(self.accelerator)))

    def trainer(self) -> Trainer.Config:
        """What `modify` gets: a whole trainer but for its input."""
        learner = Learner.Config(
            optimizer=AdamW.Config(eps=1.0),  # far below it, a first update is the gradient's sign, and that of noise
            schedule=WarmupStableDecay(peak=1.0, warmup_steps=1, decay=0.0),
        )
        return Trainer.Config(model=self.model(), objective=OBJECTIVE, learner=learner, steps=1)

    def config(self) -> Any:
        return self.modify(self.trainer())

    def batch(self) -> Batch:
        """Two rows for each device."""
        return tiny_batch(rows=2 * self._count())

    def test_the_rule_is_for_the_accelerator(self) -> None:
        _, offer = self.found()
        count = self._count()
        assert 1 < count <= devices.COUNT, f"{self.accelerator} has {count} devices; tests have {devices.COUNT}"
        if isinstance(offer, MeshRule):
            assert offer.matches(self.accelerator), f"{offer.pattern} is not for {self.accelerator}"

    def test_it_edits_the_config_the_same_way_each_time_and_not_the_original(self) -> None:
        before = self.trainer()
        kept = text(before)
        after = self.modify(before)
        assert after.diff(before)
        assert after == self.modify(before)
        assert text(before) == kept

    def test_it_changes_the_layout_and_not_the_training(self) -> None:
        before, after = self.trainer(), self.modify(self.trainer())
        for name in ("steps", "minutes", "seed", "objective", "learner", "input"):
            assert getattr(after, name) == getattr(before, name), f"{name} has nothing to do with where arrays lie"
        assert abstract(after.model)[1] == abstract(before.model)[1], "parameters have other shapes or paths"

    def test_the_loss_and_every_metric_equal_those_of_one_device(self) -> None:
        for case, found in self._compared().items():
            assert {"loss", "z_loss", "gradient_norm"} <= found.metrics.keys()
            for name, (many, one) in found.metrics.items():
                np.testing.assert_allclose(many, one, rtol=self.tolerance, err_msg=f"{case}: {name}")

    def test_every_gradient_equals_that_of_one_device(self) -> None:
        for case, found in self._compared().items():
            assert not found.vanishing, f"{case}: no gradient reaches {found.vanishing}"
            wrong = {path: error for path, error in found.gradients.items() if not error <= self.tolerance}
            assert not wrong, f"{case}: gradients differ by {wrong} of their largest value"

    def test_the_update_equals_that_of_one_device(self) -> None:
        for case, found in self._compared().items():
            wrong = {path: error for path, error in found.updates.items() if not error <= self.tolerance}
            assert not wrong, f"{case}: updates differ by {wrong} of their largest value"

    def test_parameters_and_optimizer_state_are_spread_over_devices(self) -> None:
        for case, found in self._compared().items():
            assert (max(found.parts.values()) > 1) == self.shards_parameters, f"{case}: {found.parts}"
            assert found.moments == found.parts, f"{case}: moments lie otherwise than their parameters"

    def test_the_batch_is_spread_over_devices(self) -> None:
        for case, found in self._compared().items():
            rows, held = found.rows
            assert (held < rows) == self.shards_batch, f"{case}: a device holds {held} of {rows} rows"

    def test_too_few_devices_are_used_or_refused_by_the_mesh(self) -> None:
        for found in self._compared().values():
            assert not found.refused or "mesh.shape" in found.refused

    def _count(self) -> int:
        return Accelerator.parse(self.accelerator).count

    @classmethod
    @functools.cache  # several checks look at the same steps
    def _compared(cls) -> dict[str, Compared]:
        return compare(cls()._cases())

    def _cases(self) -> dict[str, tuple[Any, Any, Any, int]]:
        plain, batch = self.trainer(), jax.device_get(self.batch())
        cases = {"plain": (plain, batch)}
        if self.remat or self.packed or self.tied:  # at once: compiling is what takes the time
            cfg = use_remat(plain, Remat()) if self.remat else plain
            cfg = ax.select(cfg, "model.head").remove() if self.tied else cfg
            extras = {"remat": self.remat, "packed rows": self.packed, "a tied embedding": self.tied}
            name = f"with {', '.join(name for name, wanted in extras.items() if wanted)}"
            cases[name] = (cfg, _packed(batch) if self.packed else batch)
        one = Mesh(shape={"data": 1}, rules={})
        return {name: (cfg.set(mesh=one), self.modify(cfg), rows, self._count()) for name, (cfg, rows) in cases.items()}


def _packed(batch: Any) -> Any:
    """The batch with several documents in each row, some padding, and uneven rows."""
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
