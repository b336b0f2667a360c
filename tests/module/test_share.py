"""Values that a layer shares with later layers, also through transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import ContextError, functional, invoke, scan, stack, traced_once


class Giver(ax.Layer):
    class Config(ax.Layer.Config):
        factor: float = 2.0

    def __call__(self, x):
        self.share("value", {"times": self.config.factor * x})
        return x


class Taker(ax.Layer):
    def __call__(self, x):
        times = self.shared("value")["times"]
        assert isinstance(times, jax.Array)  # also a number that was shared
        return x + times


class Both(ax.Layer):
    """A layer that shares a value and a layer that takes it."""

    class Config(ax.Layer.Config):
        parts: tuple[ax.Layer.Config, ...] = (Giver.Config(), Taker.Config())

    def __init__(self, cfg, *, rngs):
        self.parts = self.children("parts", cfg.parts, rngs)

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Stacked(ax.Layer):
    class Config(ax.Layer.Config):
        before: ax.Layer.Config = Giver.Config()
        each: ax.Layer.Config = Both.Config()
        after: ax.Layer.Config | None = None
        remat: bool = False

    def __init__(self, cfg, *, rngs):
        self.before = self.child("before", cfg.before, rngs)
        self.each = stack(lambda rngs: self.build_child(cfg.each, rngs), rngs.at("each"), 3)
        self.after = self.child("after", cfg.after, rngs)

    def __call__(self, x):
        x = self.before(x)
        policy = jax.checkpoint_policies.nothing_saveable if self.config.remat else None
        x = scan(self.each, x, count=3, remat=policy)
        return x if self.after is None else self.after(x)


def run(cfg, x=1.0):
    module = cfg.build(rngs=ax.Rngs(0))
    return float(jax.jit(lambda x: invoke(module, x)[0])(jnp.float32(x)))


def test_a_later_layer_receives_a_shared_value():
    assert run(Both.Config()) == 3.0


def test_the_last_shared_value_wins():
    parts = (Giver.Config(), Giver.Config(factor=10.0), Taker.Config())
    assert run(Both.Config(parts=parts)) == 11.0


def test_taking_a_value_that_is_not_shared_raises_and_names_the_layer():
    with pytest.raises(ContextError, match=r"parts\.0 \(Taker\): shared\('value'\) requires an earlier layer"):
        run(Both.Config(parts=(Taker.Config(), Giver.Config())))


@pytest.mark.parametrize("remat", [False, True])
def test_layers_share_values_within_the_body_of_a_scan(remat):
    assert run(Stacked.Config(remat=remat)) == 27.0  # each of three layers adds twice its input


@pytest.mark.parametrize("remat", [False, True])
def test_the_body_of_a_scan_reads_earlier_values(remat):
    cfg = Stacked.Config(each=Taker.Config(), remat=remat)
    assert run(cfg) == 7.0  # 1 + 3 * 2
    module = cfg.build(rngs=ax.Rngs(0))
    assert jax.grad(lambda x: invoke(module, x)[0])(jnp.float32(1.0)) == 7.0


class Before(ax.Layer):
    """Adds a value that the layer before shared, and shares another."""

    def __call__(self, x):
        x = x + self.shared("value")["times"]
        self.share("value", {"times": 3 * x})
        return x


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("before", [True, False])
def test_case_a_scan_shares_values_as_an_unrolled_stack_does(remat, before):
    """The next layers and the layers after the scan receive what a scanned layer shares."""

    def after(x, each):
        value = 2 * x
        for _ in range(3):
            if each is Before:
                x = x + value
                value = 3 * x
            else:
                value = 2 * x
                x = x + value
        return x + value

    for each in (Both, Before) if before else (Both,):
        first = Giver.Config() if before else Quiet.Config()
        cfg = Stacked.Config(before=first, each=each.Config(), after=Taker.Config(), remat=remat)
        assert run(cfg) == after(1.0, each)
        module = cfg.build(rngs=ax.Rngs(0))
        assert jax.grad(lambda x, module=module: invoke(module, x)[0])(jnp.float32(1.0)) == after(1.0, each)


def test_the_first_scanned_layer_takes_only_values_shared_before():
    with pytest.raises(ContextError, match=r": shared\('value'\) requires an earlier layer"):
        run(Stacked.Config(before=Quiet.Config(), each=Before.Config()))
    assert run(Stacked.Config(before=Wide.Config())) == 27.0  # a value of another shape is not taken


class Quiet(ax.Layer):
    def __call__(self, x):
        return x


class Wide(ax.Layer):
    def __call__(self, x):
        self.share("value", {"times": jnp.stack([x, x])})
        return x


class Mapped(ax.Layer):
    class Config(ax.Layer.Config):
        transform: str
        giver: ax.Layer.Config = Giver.Config()
        inner: ax.Layer.Config = Taker.Config()

    def __init__(self, cfg, *, rngs):
        self.giver = self.child("giver", cfg.giver, rngs)
        self.inner = self.child("inner", cfg.inner, rngs)

    def __call__(self, x):
        self.giver(x)
        call = lambda inner, x: inner(x)  # noqa: E731
        if self.config.transform == "vmap":
            return ax.vmap(call)(self.inner, jnp.stack([x, x]))
        if self.config.transform == "cond":
            return ax.cond(x > 0, call, call)(self.inner, x)
        return ax.remat(call)(self.inner, x)


@pytest.mark.parametrize("transform", ["vmap", "remat", "cond"])
def test_the_bodies_of_other_transforms_read_earlier_values(transform):
    module = Mapped.Config(transform=transform).build(rngs=ax.Rngs(0))
    found = jax.jit(lambda x: invoke(module, x)[0])(jnp.float32(1.0))
    np.testing.assert_array_equal(found, np.full(found.shape, 3.0))


class Names(ax.Layer):
    class Config(ax.Layer.Config):
        value: object = None

    def __call__(self, x):
        self.share("value", {"times": self.config.value})
        return x


@pytest.mark.parametrize("value", ["a", max, 2**40, {1: 2, "a": 3}], ids=["text", "function", "int", "dict"])
@pytest.mark.parametrize("transform", [lambda fn: fn, traced_once, ax.remat], ids=["alone", "traced_once", "remat"])
def test_only_arrays_and_numbers_are_shared_in_any_transform(value, transform):
    class Through(Both):
        class Config(Both.Config):
            pass

        def __call__(self, x):
            for part in self.parts:
                x = transform(lambda part, x: part(x))(part, x)
            return x

    def run_with(value):
        return run(Through.Config(parts=(Names.Config(value=value), Taker.Config())))

    assert run_with(2) == 3.0
    with pytest.raises(ContextError, match=r"parts\.0 \(Names\): the shared value 'value' must contain only arrays"):
        run_with(value)


def test_values_shared_in_remat_reach_later_layers_and_carry_gradients():
    class Recomputed(Both):
        class Config(Both.Config):
            pass

        def __call__(self, x):
            for part in self.parts:
                x = ax.remat(lambda part, x: part(x))(part, x)
            return x

    assert run(Recomputed.Config()) == 3.0
    module = Recomputed.Config().build(rngs=ax.Rngs(0))
    assert jax.grad(lambda x: invoke(module, x)[0])(jnp.float32(1.0)) == 3.0


@pytest.mark.parametrize("remat", [False, True])
def test_a_caller_shares_values_with_all_layers_of_one_call(remat):
    module = Stacked.Config(before=Quiet.Config(), each=Taker.Config(), remat=remat).build(rngs=ax.Rngs(0))
    fn, params, state = functional(module)

    @jax.jit
    def shared(x):
        return invoke(module, x, shared={"value": {"times": 2 * x}})[0], fn(
            params, state, x, shared={"value": {"times": 3 * x}}
        )[0][0]

    assert shared(jnp.float32(1.0)) == (7.0, 10.0)
    with pytest.raises(ContextError, match="'value'"):
        invoke(module, 1.0)


def test_each_call_starts_without_shared_values():
    class Maybe(ax.Layer):
        class Config(ax.Layer.Config):
            giver: ax.Layer.Config = Giver.Config()
            taker: ax.Layer.Config = Taker.Config()

        def __init__(self, cfg, *, rngs):
            self.giver = self.child("giver", cfg.giver, rngs)
            self.taker = self.child("taker", cfg.taker, rngs)

        def __call__(self, x, give):
            return self.taker(self.giver(x) if give else x)

    module = Maybe.Config().build(rngs=ax.Rngs(0))
    assert invoke(module, 1.0, True)[0] == 3.0
    with pytest.raises(ContextError, match="'value'"):
        invoke(module, 1.0, False)
