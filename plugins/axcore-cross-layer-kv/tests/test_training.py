"""Loss and gradients of models whose layers share keys and values, against NumPy float64."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.nn import Repeat, Sequence
from axcore.parallel import Remat
from axcore_cross_layer_kv.caches import borrowing, sharing
from axcore_cross_layer_kv.groups import use_cross_layer_kv

from . import reference
from .reference import (
    LAYER,
    POSITIONS,
    SEGMENTS,
    layers_of,
    listed,
    loss_and_grads,
    model,
    parameters,
    repeated,
    shapes,
)

pytestmark = pytest.mark.long

PACKED = reference.batch(SEGMENTS, POSITIONS)


@pytest.mark.parametrize(("num_layers", "every"), [(4, 2), pytest.param(6, 3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "batch", [pytest.param(reference.batch(), marks=pytest.mark.slow), PACKED], ids=["whole rows", "packed rows"]
)
def test_loss_matches_the_reference(num_layers, every, batch):
    cfg = repeated(num_layers, every)
    params = parameters(cfg)
    found, _ = loss_and_grads(cfg, params, batch)
    np.testing.assert_allclose(found, reference.loss(params, layers_of(params, every), batch, every), rtol=1e-5)


def test_a_shorter_last_group_computes_its_own_keys_and_values():
    cfg = use_cross_layer_kv(repeated(3), allow_shorter=True)
    params = parameters(cfg)
    layers = list(params["decoder"]["layers"].values())  # no layer is repeated
    found, _ = loss_and_grads(cfg, params, PACKED)
    np.testing.assert_allclose(found, reference.loss(params, layers, PACKED, every=2), rtol=1e-5)


def test_gradients_match_finite_differences():
    cfg, every, step = repeated(4, 2), 2, 1e-5
    params = parameters(cfg)
    _, grads = loss_and_grads(cfg, params, PACKED)
    random = np.random.default_rng(2)
    leaves, treedef = jax.tree.flatten(jax.tree.map(lambda leaf: leaf.astype(np.float64), params))
    for number, ((path, grad), leaf) in enumerate(zip(jax.tree.leaves_with_path(grads), leaves, strict=True)):
        direction = random.normal(size=leaf.shape)

        def moved(by, number=number, leaf=leaf, direction=direction):
            changed = treedef.unflatten([*leaves[:number], leaf + by * direction, *leaves[number + 1 :]])
            return reference.loss(changed, layers_of(changed, every), PACKED, every)

        slope = (moved(step) - moved(-step)) / (2 * step)
        np.testing.assert_allclose((grad * direction).sum(), slope, rtol=1e-3, atol=1e-5, err_msg=str(path))


def test_shared_keys_get_gradients_from_borrowing_layers():
    """With a projection of zeros, the first layer does not use its own keys and values."""
    cfg = repeated(4, 2)
    params = parameters(cfg)
    first = params["decoder"]["layers"]["layers"][0]["attention"]
    first["projection"]["weight"] = np.zeros_like(first["projection"]["weight"])
    _, grads = loss_and_grads(cfg, params, reference.batch())
    found = grads["decoder"]["layers"]["layers"][0]["attention"]
    assert not found["query"]["weight"].any()
    direction = np.random.default_rng(3).normal(size=first["key"]["weight"].shape)
    for name in ("key", "value"):
        kept = first[name]["weight"].astype(np.float64)

        def moved(by, name=name, kept=kept):
            first[name]["weight"] = kept + by * direction
            return reference.loss(params, layers_of(params, 2), reference.batch(), 2)

        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
        first[name]["weight"] = kept
        assert abs(slope) > 1e-3
        np.testing.assert_allclose((found[name]["weight"] * direction).sum(), slope, rtol=1e-3)


def test_borrowing_layers_have_no_key_and_value_parameters():
    params = shapes(repeated(4, 2))[1]["decoder"]["layers"]["layers"]
    assert sorted(params[0]["attention"]) == ["key", "projection", "query", "value"]
    assert sorted(params[1]["attention"]) == ["projection", "query"]
    assert params[0]["attention"]["key"]["weight"].shape == (2, 8, 4)


def test_sequence_matches_repeated_groups():
    every = 2
    params = parameters(repeated(4, every))
    spread = {**params, "decoder": {"layers": dict(enumerate(layers_of(params, every)))}}
    found, expected = (
        loss_and_grads(listed(4, every), spread, PACKED),
        loss_and_grads(repeated(4, every), params, PACKED),
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for layer, of_group in zip(found[1]["decoder"]["layers"].values(), layers_of(expected[1], every), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), layer, of_group)


def test_one_layer_can_share_with_a_later_stack():
    """As in YOCO (Sun et al. 2024, arXiv 2405.05254), where the upper half attends with one layer's keys and values."""
    first = ax.select(LAYER, "attention").map(lambda _, attention: sharing(attention, "all"))
    other = ax.select(LAYER, "attention").map(lambda _, attention: borrowing(attention, "all"))
    upper = Repeat.Config(num_layers=3, layers=other, remat=Remat())
    cfg = model(Sequence.Config(layers=(first, upper)))
    params = parameters(cfg)
    stacked = params["decoder"]["layers"][1]["layers"]
    layers = [params["decoder"]["layers"][0], *(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(3))]
    found, grads = loss_and_grads(cfg, params, PACKED)
    np.testing.assert_allclose(found, reference.loss(params, layers, PACKED, every=4), rtol=1e-5)
    assert grads["decoder"]["layers"][0]["attention"]["key"]["weight"].any()
