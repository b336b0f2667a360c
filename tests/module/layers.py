"""Small layers that draw random numbers, report values and write Variables."""

import jax
import jax.numpy as jnp
from flax import nnx

import axcore as ax
from axcore.module import stack


def ones(key, shape, dtype):
    return jnp.ones(shape, dtype)


def normal(key, shape, dtype):
    return jax.random.normal(key, shape, dtype)


class Plain(ax.Layer):
    """`x * scale`. The config selects dropout, reports and a written Variable."""

    class Config(ax.Layer.Config):
        width: int = ax.REQUIRED
        drop: bool = False
        summary: bool = False
        loss_weight: float | None = None
        counts: bool = False

    def __init__(self, cfg, *, rngs):
        self.scale = self.param("scale", (cfg.width,), normal, rngs, axes=("embed",))
        self.calls = nnx.data(None)
        if cfg.counts:
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        x = x * self.scale[...]
        if self.config.drop:
            x = x * jax.random.bernoulli(self.rng("dropout"), 0.5, x.shape)
        if self.config.summary:
            self.add_summary("mean", x.mean())
        if self.config.loss_weight is not None:
            self.add_loss("square", (x**2).sum(), x.size, self.config.loss_weight)
        if self.calls is not None:
            self.calls[...] = self.calls[...] + jnp.sum(x > 0).astype(jnp.int32)
        return x


class Draw(ax.Layer):
    """Two draws of one stream and one of another, as raw bits."""

    class Config(ax.Layer.Config):
        pass

    def __init__(self, cfg, *, rngs):
        pass

    def __call__(self):
        keys = (self.rng("a"), self.rng("a"), self.rng("b"))
        return jnp.stack([jax.random.key_data(key) for key in keys])


class Parent(ax.Layer):
    """A layer with named children that calls some of them."""

    class Config(ax.Layer.Config):
        children: tuple[tuple[str, ax.Config], ...] = ()

    def __init__(self, cfg, *, rngs):
        for name, child in cfg.children:
            setattr(self, name, self.child(name, child, rngs))

    def __call__(self, *names_and_args):
        name, *args = names_and_args
        return getattr(self, name)(*args)


class Stacked(ax.Layer):
    """A scanned stack."""

    class Config(ax.Layer.Config):
        layer: ax.Layer.Config
        count: int = 3
        unroll: int = 1
        remat: bool = False

    def __init__(self, cfg, *, rngs):
        self.layers = stack(lambda rngs: self.build_child(cfg.layer, rngs), rngs.at("layers"), cfg.count)

    def __call__(self, x):
        cfg = self.config
        policy = jax.checkpoint_policies.nothing_saveable if cfg.remat else None
        return ax.scan(self.layers, x, count=cfg.count, unroll=cfg.unroll, remat=policy)


class Unrolled(ax.Layer):
    """The same layers in a list."""

    class Config(ax.Layer.Config):
        layer: ax.Layer.Config
        count: int = 3

    def __init__(self, cfg, *, rngs):
        below = rngs.at("layers")
        self.layers = nnx.List([self.build_child(cfg.layer, below.at(str(index))) for index in range(cfg.count)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
