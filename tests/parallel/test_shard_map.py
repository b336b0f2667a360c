"""`shard_map`, compared with the unsharded function: results, random numbers and reduced reports."""

import numpy as np
import pytest

from .sharded import X
from .test_eight_devices import results  # noqa: F401 - one subprocess for both files

pytestmark = pytest.mark.long


@pytest.fixture
def found(results):  # noqa: F811
    return results["shard_map"]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        *((name, "plain") for name in ("child", "self", "own shards", "in remat", "of remat")),
        ("stacked self", "stacked plain"),
        ("stacked own shards", "stacked plain"),
    ],
)
def test_values_gradients_and_mean_reports_equal_the_unsharded_call(found, name, plain):
    assert found[name].keys() == found[plain].keys()
    for part in ("value", "output"):
        np.testing.assert_allclose(found[name][part], found[plain][part], rtol=1e-5, err_msg=part)
    for gradient, expected in zip(found[name]["gradients"], found[plain]["gradients"], strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    for part in ("summaries", "losses"):
        assert list(found[name][part]) == list(found[plain][part])
        for path, value in found[plain][part].items():
            np.testing.assert_allclose(found[name][part][path], value, rtol=1e-5, err_msg=path)


def test_summaries_are_reduced_over_devices_by_their_reduction(found):
    sums = X.astype(np.float64).sum(1)
    expected = {"mean": sums.mean(), "sum": sums.sum(), "max": sums.max(), "min": sums.min(), "last": sums[-1]}
    for rule, value in expected.items():
        np.testing.assert_allclose(found["rules"][rule], value, rtol=1e-6, err_msg=rule)
    counts, edges = np.histogram(X[-1], bins=30)
    np.testing.assert_array_equal(found["rules"]["histogram"][0], counts)
    np.testing.assert_allclose(found["rules"]["histogram"][1], edges[1:], rtol=1e-5)


def test_each_device_and_each_call_draws_different_bits(found):
    assert len({tuple(row) for row in found["draws"]}) == len(found["draws"]) == 18
    assert found["draws"] == found["draws without jit"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("foreign module", "top (Holder) runs shard_map on a Plain that it does not contain"),
        (
            "written",
            "in top (Holder) a layer writes inner.calls inside shard_map, but the Variable has no axes. "
            "Create it with axes=(...), or write it outside",
        ),
        ("no layout", "top (Holder) runs shard_map, but no layout is active. Call it inside `layout.active()`"),
        ("nested", "top (Holder) runs shard_map inside another shard_map over all axes of the mesh"),
        ("captured", "top.inner: outputs cannot be captured inside shard_map"),
    ],
)
def test_errors_name_the_layer(found, case, message):
    assert found["messages"][case] == f"ContextError: {message}"


def test_axes_that_cannot_be_gathered_or_divided_raise(found):
    assert found["messages"]["gathers"] == "ConfigError: gather names fsdp, but the axes of the mesh are data, tensor"
    assert "ConfigError: scale of shape (6,) is not divisible into shards" in found["messages"]["not divisible"]
