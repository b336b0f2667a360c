"""The invocation context."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axcore as ax
from axcore.module import ContextError, current, functional, invoke, labelled, scan, stack
from axcore.module.context import Collections

from .layers import Draw, Parent, Plain

ONES = jnp.ones(3)
KEY = jax.random.key(0)


class Probe(ax.Layer):
    """Returns what the context provides."""

    class Config(ax.Layer.Config):
        pass

    def __init__(self, cfg, *, rngs):
        pass

    def __call__(self):
        return self.frame.path, self.training

    @ax.method
    def other(self):
        return self.frame.path, self.training

    def unmarked(self):
        return current().path


class Holder(ax.Layer):
    """Contains a probe in every kind of container."""

    class Config(ax.Layer.Config):
        pass

    def __init__(self, cfg, *, rngs):
        def make():
            return Probe.Config().build(rngs=rngs)

        self.plain = make()
        self.listed = nnx.List([make(), make()])
        self.named = nnx.Dict(first=make(), second=make())
        self.deep = nnx.List([nnx.Dict(x=nnx.List([make()]))])
        self.stock = nnx.Sequential(make())
        self.data = nnx.data([make()])

    def __call__(self, reach):
        return reach(self)()


@pytest.fixture(scope="module")
def holder():
    return Holder.Config().build(rngs=ax.Rngs(0))


def build(cfg):
    return cfg.build(rngs=ax.Rngs(0))


@pytest.mark.parametrize(
    ("reach", "path"),
    [
        (lambda holder: holder.plain, "plain"),
        (lambda holder: holder.listed[1], "listed.1"),
        (lambda holder: holder.named["second"], "named.second"),
        (lambda holder: holder.named.first, "named.first"),
        (lambda holder: holder.deep[0]["x"][0], "deep.0.x.0"),
        (lambda holder: holder.stock, "stock.layers.0"),
        (lambda holder: holder.data[0], "data.0"),
    ],
)
def test_the_path_of_a_child_consists_of_attribute_names(holder, reach, path):
    assert invoke(holder, reach)[0][0] == path


def test_nested_layers_join_their_paths():
    inner = Parent.Config(children=(("b", Probe.Config()),))
    assert invoke(build(Parent.Config(children=(("a", inner),))), "a", "b")[0][0] == "a.b"


def test_the_path_of_the_root_is_empty(holder):
    assert invoke(holder.plain)[0] == ("", False)


def test_training_reaches_all_layers(holder):
    assert invoke(holder, lambda holder: holder.plain, training=True)[0] == ("plain", True)
    assert invoke(holder, lambda holder: holder.plain)[0] == ("plain", False)


def test_a_layer_called_without_invoke_is_a_root_in_the_mode_that_was_set(holder):
    for set_mode, training in ((holder.train, True), (holder.eval, False)):
        set_mode()
        assert holder.plain() == ("", training)
        assert holder(lambda holder: holder.plain) == ("plain", training)


def test_a_method_runs_in_the_frame_of_its_layer(holder):
    assert invoke(holder, lambda holder: holder.plain.other)[0] == ("plain", False)
    assert invoke(holder, lambda holder: holder.plain.unmarked)[0] == ""


def test_invoke_runs_a_named_method(holder):
    assert invoke(holder.plain, method="other", training=True)[0] == ("", True)


def test_a_draw_without_a_key_raises_and_names_the_layer():
    parent = build(Parent.Config(children=(("d", Draw.Config()),)))
    with pytest.raises(ContextError, match=r"d \(Draw\) drew from the PRNG stream 'a'.*axcore\.invoke\(module, .*key="):
        invoke(parent, "d")
    with pytest.raises(ContextError, match=r"d \(Draw\)"):
        parent("d")


def test_current_outside_of_a_call_raises():
    with pytest.raises(ContextError, match=r"axcore\.invoke"):
        current()


def test_a_summary_has_the_path_and_is_dropped_without_invoke():
    parent = build(Parent.Config(children=(("p", Plain.Config(width=3, summary=True)),)))
    output, collections = invoke(parent, "p", ONES)
    assert list(collections.summaries) == ["p.mean"]
    np.testing.assert_allclose(collections.summaries["p.mean"], np.mean(output), rtol=1e-6)
    np.testing.assert_allclose(parent("p", ONES), output)


def test_a_loss_is_weighted_and_summed():
    cfg = Parent.Config(
        children=(("p", Plain.Config(width=3, loss_weight=0.5)), ("q", Plain.Config(width=3, loss_weight=2.0)))
    )

    class Both(Parent):
        def __call__(self, x):
            return self.q(self.p(x))

    model = build(Both.Config(children=cfg.children))
    p, q = np.asarray(model.p.scale[...], np.float64), np.asarray(model.q.scale[...], np.float64)
    _, collections = invoke(model, ONES)
    np.testing.assert_allclose(collections.losses["p.square"].mean(), 0.5 * np.mean(p**2), rtol=1e-5)
    np.testing.assert_allclose(collections.losses["q.square"].mean(), 2.0 * np.mean((p * q) ** 2), rtol=1e-5)
    np.testing.assert_allclose(collections.total_loss(), 0.5 * np.mean(p**2) + 2 * np.mean((p * q) ** 2), rtol=1e-5)
    assert Collections().total_loss() == 0.0


def test_a_loss_without_invoke_raises_and_names_the_layer():
    parent = build(Parent.Config(children=(("p", Plain.Config(width=3, loss_weight=1.0)),)))
    with pytest.raises(ContextError, match=r"p \(Plain\) adds the loss 'square', but the call does not collect losses"):
        parent("p", ONES)


class Twice(Parent):
    def __call__(self, x):
        return self.p(self.p(x))


@pytest.mark.parametrize("reports", [{"summary": True}, {"loss_weight": 1.0}])
def test_reporting_twice_under_one_name_raises_and_names_the_layer(reports):
    model = build(Twice.Config(children=(("p", Plain.Config(width=3, **reports)),)))
    with pytest.raises(ContextError, match=r"p \(Plain\) reports '(mean|square)' twice"):
        invoke(model, ONES)


class ByBlock(ax.Layer):
    """Reports of each block of rows, as attention makes them for blocks of different widths."""

    def __call__(self, blocks):
        def one(x):
            for reduce in ax.Reduce:
                self.add_summary(reduce, x.mean(), reduce)
            if x.shape[1] > 1:
                self.add_summary("wide", x.mean())
                self.add_image("image", jnp.ones((2, x.shape[1], 1)))
            self.add_loss("loss", x.sum(), x.size, weight=0.5)
            self.add_output("x", x)
            return 2 * x

        return self.frame.map(one, blocks)


def test_reports_of_blocks_under_one_name_are_combined():
    blocks = (jnp.ones((3, 1)), 3 * jnp.ones((1, 2)), 8 * jnp.ones((1, 4)))
    doubled, reported = invoke(build(ByBlock.Config()), blocks, capture=["x"])
    assert [each.shape for each in doubled] == [(3, 1), (1, 2), (1, 4)] and float(doubled[2][0, 0]) == 16
    values = {name: float(each) for name, each in reported.summaries.items() if each.kind == "scalar"}
    assert values == {"mean": 4.0, "sum": 12.0, "max": 8.0, "min": 1.0, "last": 8.0, "wide": 5.5}
    assert reported.summaries["image"].value.shape == (2, 4, 1)
    loss = reported.losses["loss"]
    assert (float(loss.total), float(loss.count), loss.weight) == (3 + 6 + 32, 3 + 2 + 4, 0.5)
    assert reported.outputs["x"].shape == (1, 4)


class ScannedTwice(ax.Layer):
    class Config(ax.Layer.Config):
        layer: ax.Layer.Config

    def __init__(self, cfg, *, rngs):
        self.layers = stack(lambda rngs: self.build_child(cfg.layer, rngs), rngs.at("layers"), 2)

    def __call__(self, x):
        return scan(self.layers, scan(self.layers, x, count=2), count=2)


@pytest.mark.parametrize("reports", [{"summary": True}, {"loss_weight": 1.0}])
def test_scanning_a_stack_twice_keeps_the_reports_of_the_first_scan(reports):
    model = build(ScannedTwice.Config(layer=Plain.Config(width=3, **reports)))
    with pytest.raises(ContextError, match=r"layers.*twice"):
        invoke(model, ONES)


def test_a_layer_called_twice_draws_different_bits_or_raises():
    class DrawsTwice(Parent):
        def __call__(self):
            return self.d(), self.d()

    model = build(DrawsTwice.Config(children=(("d", Draw.Config()),)))
    try:
        (one, two), _ = invoke(model, key=KEY)
    except ContextError:
        return
    assert not np.array_equal(one, two)


def test_calling_a_layer_outside_the_caller_raises_and_names_both(holder):
    stranger = build(Probe.Config())
    with pytest.raises(ContextError, match=r"Probe was called inside plain|Probe was called inside Holder"):
        invoke(holder, lambda holder: stranger)


def test_a_merged_copy_is_not_the_child(holder):
    def copy(holder):
        return nnx.merge(*nnx.split(holder.plain))

    with pytest.raises(ContextError, match=r"nnx\.merge is not the child"):
        invoke(holder, copy)


def test_a_layer_passed_down_by_an_ancestor_keeps_its_path():
    class Caller(Parent):
        def __call__(self, other):
            return other()

    class Top(Parent):
        def __call__(self):
            return self.caller(self.probe)

    model = build(Top.Config(children=(("caller", Caller.Config()), ("probe", Probe.Config()))))
    assert invoke(model, training=True)[0] == ("probe", True)


class Base(ax.Layer):
    class Config(ax.Layer.Config):
        pass

    def __init__(self, cfg, *, rngs):
        pass

    def __call__(self):
        return self.frame.path, jax.random.key_data(self.rng("a"))


class Derived(Base):
    def __call__(self):
        path, bits = super().__call__()
        return path, bits, self.frame.path, jax.random.key_data(self.rng("a"))


def test_super_call_stays_in_the_same_frame_and_continues_its_draws():
    model = build(Parent.Config(children=(("x", Derived.Config()),)))
    (inner_path, first, path, second), _ = invoke(model, "x", key=KEY)
    assert inner_path == path == "x"
    assert not np.array_equal(first, second)


class Raises(ax.Layer):
    class Config(ax.Layer.Config):
        pass

    def __init__(self, cfg, *, rngs):
        pass

    def __call__(self):
        raise ValueError("inside")


def test_an_exception_restores_the_stack():
    model = build(Parent.Config(children=(("r", Raises.Config()), ("probe", Probe.Config()))))
    for call in (lambda: invoke(model, "r"), lambda: model("r")):
        with pytest.raises(ValueError, match="inside"):
            call()
        with pytest.raises(ContextError):
            current()
    assert invoke(model, "probe")[0][0] == "probe"


def test_an_exception_that_a_layer_catches_restores_its_frame():
    class Catches(Parent):
        def __call__(self):
            try:
                self.r()
            except ValueError:
                return self.frame.path, self.probe()

    catches = Catches.Config(children=(("r", Raises.Config()), ("probe", Probe.Config())))
    model = build(Parent.Config(children=(("c", catches),)))
    assert invoke(model, "c")[0] == ("c", ("c.probe", False))


def test_invoke_inside_a_call_starts_a_new_context_and_restores_the_outer(holder):
    class Nested(Parent):
        def __call__(self):
            _, collections = invoke(self.p, ONES, key=KEY)
            return list(collections.summaries), self.frame.path, self.training

    nested = Nested.Config(children=(("p", Plain.Config(width=3, summary=True)),))
    model = build(Parent.Config(children=(("n", nested),)))
    (inner, path, training), collections = invoke(model, "n", training=True)
    assert (inner, path, training) == (["mean"], "n", True)
    assert not collections.summaries


def test_each_thread_has_its_own_context(holder):
    barrier = threading.Barrier(2, timeout=600)
    seen = {}

    def reach(holder):
        barrier.wait()
        return holder.plain

    def work(training):
        seen[training] = invoke(holder, reach, training=training)[0]

    threads = [threading.Thread(target=work, args=(training,)) for training in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert seen == {True: ("plain", True), False: ("plain", False)}


def test_a_thread_started_inside_a_call_does_not_inherit_the_frame(holder):
    found = []

    def look():
        try:
            found.append(current().path)
        except ContextError:
            found.append("none")

    def reach(holder):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(timeout=600)
        return holder.plain

    invoke(holder, reach)
    assert found == ["none"]


def test_code_outside_any_layer_reads_the_current_frame():
    def helper():
        current().add_summary("from_helper", 1.0)
        return current().path

    class Calls(Parent):
        def __call__(self):
            return helper()

    path, collections = invoke(build(Parent.Config(children=(("c", Calls.Config()),))), "c")
    assert path == "c"
    assert list(collections.summaries) == ["c.from_helper"]


def test_layers_inside_a_plain_nnx_module_have_paths():
    root = nnx.Sequential(build(Probe.Config()))
    assert invoke(root)[0][0] == "layers.0"


def test_labelled_splits_scanned_and_doubly_scanned_entries():
    entries = {"a": 1, "b.*.c": [1, 2], "d.*.e.*.f": [[1, 2], [3, 4]], "g*.h": 5}
    assert labelled(entries) == {
        "a": 1,
        "b.0.c": 1,
        "b.1.c": 2,
        "d.0.e.0.f": 1,
        "d.0.e.1.f": 2,
        "d.1.e.0.f": 3,
        "d.1.e.1.f": 4,
        "g*.h": 5,
    }


class Leaks(ax.Layer):
    class Config(ax.Layer.Config):
        pass

    def __init__(self, cfg, *, rngs):
        self.weight = self.param(
            "weight", (3,), lambda key, shape, dtype: jnp.ones(shape, dtype), rngs, axes=("embed",)
        )

    def __call__(self, x):
        self.kept = x
        return x * self.weight[...]


def test_keeping_a_tracer_raises_and_names_the_layer():
    model = build(Parent.Config(children=(("leaky", Leaks.Config()),)))
    fn, params, state = functional(model)
    with pytest.raises(Exception, match="leaky"):
        jax.jit(lambda params, x: fn(params, state, "leaky", x)[0][0])(params, ONES)
