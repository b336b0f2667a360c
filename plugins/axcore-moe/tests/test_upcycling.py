"""Upcycling a dense model: the mixture computes what it did."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract, functional
from axcore.testing import tiny_batch, tiny_model
from axcore.train import FromRun, save_model
from axcore.train.initial import gathered
from axcore.train.model_folder import flat, like
from axcore_moe.layer import MoE
from axcore_moe.upcycling import Upcycled


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """(folder, what the dense model computes)."""
    cfg = ax.select(tiny_model(), "decoder").set(num_layers=4)
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(3)))
    folder = save_model(tmp_path_factory.mktemp("dense") / "model", cfg, params, state)
    return folder, fn(params, state, tiny_batch()["inputs"])[0][0]


def computed(folder, every=2, **fields):
    cfg = ax.select(tiny_model(), "decoder").set(num_layers=4)
    cfg = ax.pipe(cfg, ax.use("moe", num_experts=3, top_k=2, every=every))
    fn, params, state = abstract(cfg)
    initial = Upcycled.Config(source=FromRun.Config(folder=str(folder)), **fields)
    arrays = gathered(initial, cfg, flat(params), flat(state), 0)
    return fn(like(params, arrays), like(state, arrays), tiny_batch()["inputs"])[0][0], arrays


@pytest.mark.parametrize("every", [1, 2, 3])
def test_it_computes_what_the_dense_model_did(dense, every):
    np.testing.assert_allclose(computed(dense[0], every)[0], dense[1], rtol=1e-4, atol=1e-5)


def test_noise_tells_the_experts_apart(dense):
    found, arrays = computed(dense[0], noise=0.1)
    assert np.abs(found - dense[1]).max() > 1e-3
    (experts,) = (leaf for path, leaf in arrays.items() if path.endswith("experts.up"))
    assert not np.array_equal(experts[0, 0], experts[0, 1])
    clean = jax.tree.leaves(computed(dense[0])[1])[0]
    assert np.isfinite(clean).all()


def test_what_is_no_sum_of_copies_is_refused(dense):
    folder = str(dense[0])
    for options, message in (
        ({"shared_experts": 1}, "a shared block has no counterpart"),
        ({"scale": 2.0}, "sum to 1"),
    ):
        cfg = ax.pipe(tiny_model(), ax.use("moe", num_experts=3, **options))
        _, params, state = abstract(cfg)
        initial = Upcycled.Config(source=FromRun.Config(folder=folder))
        with pytest.raises(ax.ConfigError, match=message):
            gathered(initial, cfg, flat(params), flat(state), 0)
    with pytest.raises(ax.ConfigError, match="nothing in the config matches MoE"):
        _, params, state = abstract(tiny_model())
        gathered(initial, tiny_model(), flat(params), flat(state), 0)
    assert ax.select(cfg, MoE)
