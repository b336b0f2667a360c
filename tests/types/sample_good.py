"""Code as a plugin author writes it. `test_types.py` checks it with mypy; it is never executed."""

from typing import assert_type

import jax

import axcore as ax
from axcore.nn import FeedForward, Linear, TransformerLayer


class Gate(ax.Layer):
    class Config(ax.Layer.Config):
        input_dim: int = ax.REQUIRED
        rank: int = 4
        scale: float | None = None
        inner: Linear.Config = Linear.Config()
        extra: tuple[ax.Layer.Config, ...] = ()

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        assert_type(cfg.rank, int)
        assert_type(cfg.scale, float | None)
        assert_type(cfg.inner, Linear.Config)
        assert_type(cfg.inner.use_bias, bool)
        self.inner = self.child("inner", cfg.inner, rngs, input_dim=cfg.input_dim, output_dim=cfg.rank)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.add_summary("mean", x.mean())
        return self.inner(x) * (self.config.scale or 1.0)


class Wide(Gate):
    class Config(Gate.Config):
        rank: int = 64
        factor: float = 2.0


def use_gate(cfg: TransformerLayer.Config, *, rank: int = 4) -> TransformerLayer.Config:
    return ax.select(cfg, FeedForward).swap(Gate.Config(rank=rank), drop=("hidden_dim",))


node = Gate.Config(rank=8, scale=0.5)
assert_type(node.set(rank=3), Gate.Config)
assert_type(Wide.Config(rank=1, factor=3.0).set(factor=1), Wide.Config)
layer = TransformerLayer.Config()
assert_type(ax.select(layer, Linear).set(use_bias=True), TransformerLayer.Config)
assert_type(ax.select(layer, "ffn").map(lambda path, node: node), TransformerLayer.Config)
assert_type(ax.select(layer, FeedForward).remove(), TransformerLayer.Config)
assert_type(ax.override(layer, ["ffn.hidden_dim=8"]), TransformerLayer.Config)
assert_type(ax.pipe(layer, use_gate), TransformerLayer.Config)
assert_type(ax.pipe(layer, ax.use("rope", theta=1e4), use_gate), TransformerLayer.Config)
assert_type(ax.Modifier("gate", use_gate)(layer), TransformerLayer.Config)
assert_type(ax.to_json(node), str)
assert_type(ax.nn.Linear.Config(), Linear.Config)
assert_type(ax.train.Trainer.Config().steps, int | None)
assert_type(ax.Trainer.Config().steps, int | None)
assert_type(str(ax.tree(layer)) + str(ax.plugin.registry().plugins["core"]), str)
assert_type(str(node.diff(node)) + str(node.history("rank")), str)
