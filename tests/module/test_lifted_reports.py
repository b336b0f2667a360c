"""Summaries and outputs that layers report in transforms."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import cond, invoke, labelled, remat, vmap
from axcore.module.collections import histogram

from .layers import Stacked
from .lifted import KEY, QUIET, SUMS, X, build, call_inner, holder, in_a_parent


def test_labelled_splits_summaries_of_nested_stacks():
    cfg = holder(lambda self, x: remat(call_inner)(self, x), SUMS)
    for count in (2, 3):
        cfg = Stacked.Config(layer=cfg, count=count)
    summaries = jax.jit(lambda: invoke(cfg.build(rngs=ax.Rngs(0)), X, key=KEY)[1])().summaries
    whole = summaries["layers.*.layers.*.inner.mean"].value
    assert whole.shape == (3, 2)
    spelled = labelled(summaries)
    assert list(spelled) == [f"layers.{i}.layers.{j}.inner.mean" for i in range(3) for j in range(2)]
    np.testing.assert_array_equal([float(each) for each in spelled.values()], whole.ravel())


def test_labelled_splits_only_at_whole_segments():
    assert labelled({"p*q.*.r": [1, 2]}) == {"p*q.0.r": 1, "p*q.1.r": 2}
    pair = labelled({"a.*.b": (jnp.arange(2), {"c": jnp.arange(4).reshape(2, 2)})})
    assert list(pair) == ["a.0.b", "a.1.b"]
    np.testing.assert_array_equal(pair["a.1.b"][1]["c"], [2, 3])


@pytest.mark.parametrize(
    "values", [np.random.default_rng(0).normal(size=101), np.zeros(5), np.arange(12).reshape(3, 4)]
)
def test_a_histogram_equals_numpy(values):
    counts, edges = np.histogram(values.astype(np.float32), bins=30)
    found = histogram(jnp.asarray(values))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found[0], counts)
    np.testing.assert_allclose(found[1], edges[1:], rtol=1e-5, atol=1e-6)


def shows(self, x):
    self.add_output("half", x / 2)
    self.add_output("unwanted", x)
    return self.inner(x)


CAPTURING = {"plain": shows, "remat": lambda s, x: remat(shows)(s, x), "vmap": lambda s, x: vmap(shows)(s, x)}
CAPTURING["cond"] = lambda s, x: cond(x[0, 0] > 0, shows, shows)(s, x)


@pytest.mark.parametrize("name", CAPTURING)
def test_capture_selects_outputs_by_pattern(name):
    model = in_a_parent(CAPTURING[name], QUIET)
    output, reported = jax.jit(lambda x: invoke(model, "top", x, capture=["**.inner", "top.half"]))(X)
    assert sorted(reported.outputs) == ["top.half", "top.inner"]
    np.testing.assert_array_equal(reported.outputs["top.inner"], output)
    np.testing.assert_array_equal(reported.outputs["top.half"], X / 2)
    assert not invoke(model, "top", X)[1].outputs


@pytest.mark.parametrize("name", CAPTURING)
def test_capture_collects_the_outputs_of_each_scanned_layer(name):
    model = Stacked.Config(layer=holder(CAPTURING[name], QUIET), count=2).build(rngs=ax.Rngs(0))
    output, reported = jax.jit(lambda x: invoke(model, x, capture=["**.inner", "**.half"]))(X)
    assert sorted(reported.outputs) == ["layers.*.half", "layers.*.inner"]
    spelled = labelled(reported.outputs)
    np.testing.assert_array_equal(spelled["layers.1.inner"], output)
    np.testing.assert_allclose(spelled["layers.1.half"], spelled["layers.0.inner"] / 2, rtol=1e-6)


def test_concurrent_traces_have_separate_reports():
    barrier, found = threading.Barrier(2, timeout=600), {}

    def work(number):
        def body(self, x):
            barrier.wait()
            self.add_summary(f"of_{number}", x.sum())
            return self.inner(x)

        model = build(lambda self, x: remat(body)(self, x))
        found[number] = sorted(invoke(model, X, key=KEY, training=True)[1].summaries)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert found == {number: ["inner.mean", f"of_{number}"] for number in range(2)}
