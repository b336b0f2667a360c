"""Each feed-forward block is a mixture of eight experts, weighted by a softmax over all."""

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import BaseAttention, CausalLM, GroupedLinear, Linear, Repeat, TransformerLayer
from axcore.train import Trainer

from ..training import pretraining


class Mixture(ax.Layer):
    """Experts `down(gelu(up(x)))`. Every expert processes every token."""

    class Config(ax.Layer.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        experts: ax.PositiveInt = 8
        hidden_dim: ax.PositiveInt = 12
        gate: Linear.Config = Linear.Config()
        up: Linear.Config = Linear.Config()
        down: Linear.Config = Linear.Config()

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        self.gate = self.child(
            "gate", cfg.gate, rngs, input_dim=cfg.input_dim, output_dim=cfg.experts, axes=("embed", None)
        )
        self.up = self._experts("up", rngs, cfg.input_dim, cfg.hidden_dim, ("expert", "embed", "mlp"))
        self.down = self._experts("down", rngs, cfg.hidden_dim, cfg.input_dim, ("expert", "mlp", "embed"))

    def _experts(
        self, name: str, rngs: ax.Rngs, input_dim: int, output_dim: int, axes: tuple[str, str, str]
    ) -> GroupedLinear:
        grouped = GroupedLinear.Config.of(getattr(self.config, name))
        widths = {"groups": self.config.experts, "input_dim": input_dim, "output_dim": output_dim}
        made: GroupedLinear = self.child(name, grouped, rngs, **widths, axes=axes)
        return made

    def __call__(self, x: jax.Array) -> jax.Array:
        flat = x.reshape(-1, x.shape[-1])
        weights = jax.nn.softmax(self.gate(flat), axis=-1)
        rows = jnp.broadcast_to(flat, (self.config.experts, *flat.shape))
        outputs = self.down.batched(jax.nn.gelu(self.up.batched(rows)))
        return jnp.einsum("end,ne->nd", outputs, weights.astype(outputs.dtype)).reshape(x.shape)


def recipe(attention: BaseAttention.Config) -> Trainer.Config:
    layer = TransformerLayer.Config(attention=attention, ffn=Mixture.Config())
    decoder = Repeat.Config(num_layers=2, layers=layer)
    return pretraining(CausalLM.Config(vocab_size=32, dim=32, decoder=decoder))
