"""A training step with the strategies of axcore-new-parallelism equals the step on one device."""

import pytest

import axcore as ax
from axcore.plugin import Accelerator, ContextParallelismOffer
from axcore.testing import ParallelismSuite
from axcore_new_parallelism.rules import pairs
from axcore_new_parallelism.schedule import OneByOne


class TestPairs(ParallelismSuite):
    name = "new-parallelism"
    accelerator = "gpu-new-parallelism-4x2"  # 2 hosts of 4 GPUs, so each of the three axes has two devices


class TestGatherKeys(ParallelismSuite):
    kind = ContextParallelismOffer
    name = "new-parallelism-context"

    def trainer(self):
        return super().trainer().set(mesh=ax.Mesh(shape={"data": 2, "fsdp": 2, "context": 2}))


def test_an_odd_number_of_gpus_raises():
    with pytest.raises(ax.ConfigError, match="even number of GPUs per host, got 1"):
        pairs(TestPairs().trainer(), Accelerator.parse("gpu-new-parallelism-1x8"))


def test_a_stage_keeps_the_activations_of_one_microbatch():
    table = OneByOne.Config(chunks=2).build().table(stages=4, microbatches=8)
    assert table.num_residuals == 2  # one for each chunk
