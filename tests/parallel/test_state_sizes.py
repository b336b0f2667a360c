"""Parameters and optimizer state per device fall as 1/n with FSDP, and with ZeRO for the optimizer state."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.parallel import Mesh
from axcore.train.step.program import program


def bytes_of(tree):
    """Bytes of one device's shards."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )


def state(shape, count, zero=0):
    cfg = ax.recipe("llama2-7b")
    return program(cfg.model, cfg.learner, Mesh(shape=shape, zero=zero).abstract(count, "gpu")).state


@pytest.mark.parametrize("count", [8, 64, 512])
def test_fsdp_divides_the_state_of_a_7b_model_by_the_number_of_devices(count):
    whole, sharded = state({"data": 1}, 1), state({"fsdp": count}, count)
    for name in ("params", "optimizer"):
        ratio = bytes_of(getattr(whole, name)) / bytes_of(getattr(sharded, name))
        assert ratio == pytest.approx(count, rel=1e-3), name


def test_zero_divides_only_the_optimizer_state():
    whole, sharded = state({"data": 1}, 1), state({"data": 8}, 8, zero=1)
    assert bytes_of(sharded.params) == bytes_of(whole.params)
    assert bytes_of(whole.optimizer) / bytes_of(sharded.optimizer) == pytest.approx(8, rel=1e-3)
