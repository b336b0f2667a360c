"""The base of attention layers: their slots, mask and kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
from einops import rearrange
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from axcore.config import REQUIRED, Fraction, PositiveFloat, PositiveInt
from axcore.module import Layer, Rngs
from axcore.nn.attention.choice import attend
from axcore.nn.attention.inputs import AttentionInputs, Bias, Dropout, Heads, isolate_nan
from axcore.nn.attention.kernel import AttentionKernel
from axcore.nn.attention.masks import Causal, Mask, SameSegment
from axcore.nn.attention.reference import ReferenceKernel
from axcore.nn.initializers import Initializer
from axcore.nn.kv.cache import KVCache
from axcore.nn.kv.views import Contiguous
from axcore.nn.linear import Linear
from axcore.nn.tokens import TokenInfo

Hidden = Float[Array, "batch seq embed"]


class BaseAttention(Layer):
    """Base of attention layers. Subclasses compute queries, keys and values.

    Slots, empty unless a feature fills them:

    - `position`: `(q, k, query_positions, key_positions) -> (q, k)`, a position embedding such as RoPE; k is None if
      the attention computes no keys itself;
    - `bias`: `(query, key) -> bias`, maps the `TokenInfo` of queries and keys to a float32 array [batch or 1, head,
      query, key] that is added to the logits, such as ALiBi;
    - `cache`: `AttentionInputs -> AttentionInputs or heads`, stores or provides keys and values (see `KVCache`);
    - `output`: `(x, heads) -> heads`, applied before the output projection.

    The values `query`, `key`, `value`, `heads` and `projection` (the result) are tagged for remat policies.

    Children receive `input_dim`, `num_heads`, `num_kv_heads` and `head_dim` if their configs declare these fields.
    """

    class Config(Layer.Config):
        layout_fields = ("cache", "kernel")
        input_dim: PositiveInt = REQUIRED
        num_heads: PositiveInt = REQUIRED
        position: Layer.Config | None = None
        bias: Layer.Config | None = None
        cache: KVCache.Config | None = None
        mask: Mask = Causal() & SameSegment()
        kernel: AttentionKernel.Config = ReferenceKernel.Config()
        scale: PositiveFloat | None = None
        """Multiplies the logits; None: `1 / sqrt(head_dim)`."""
        softcap: PositiveFloat | None = None
        """Bounds the logits to `softcap * tanh(logits / softcap)`; None: no bound."""
        sinks: Initializer | None = None
        """Initializer of the attention sinks: each head learns the logit of an additional key without a value. None: no
        sinks."""
        dropout: Fraction = 0.0
        """Probability of zeroing each attention weight while training."""
        output: Layer.Config | None = None
        projection: Linear.Config = Linear.Config()

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> BaseAttention.Config:
            return self if self.cache is not None else self.set(cache=cache)

    config: Config
    kernel: AttentionKernel
    cache: KVCache | None
    sinks: nnx.Param[jax.Array] | None

    def make_slots(
        self,
        rngs: Rngs,
        *,
        num_kv_heads: int,
        head_dim: int,
        position_dim: int | None = None,
        value_dim: int | None = None,
    ) -> None:
        """Builds the slots and the output projection.

        Args:
            num_kv_heads: number of kv heads.
            head_dim: features of a key.
            position_dim: features of a head that the position embedding acts on; None: head_dim.
            value_dim: features of a value; None: head_dim.
        """
        cfg = self.config
        self.sinks = nnx.data(None)
        if cfg.sinks is not None:
            self.sinks = self.param("sinks", (cfg.num_heads,), cfg.sinks, rngs, axes=("head",))
        widths = {"input_dim": cfg.input_dim, "num_heads": cfg.num_heads, "num_kv_heads": num_kv_heads}
        self.position = self.child("position", cfg.position, rngs, **widths, head_dim=position_dim or head_dim)
        widths["head_dim"] = head_dim
        self.bias = self.child("bias", cfg.bias, rngs, **widths)
        self.kernel = self.child("kernel", cfg.kernel, rngs, **widths)
        self.output = self.child("output", cfg.output, rngs, **widths)
        projection_widths = {"input_dim": cfg.num_heads * (value_dim or head_dim), "output_dim": cfg.input_dim}
        self.projection = self.child("projection", cfg.projection, rngs, **projection_widths, axes=("head", "embed"))

    def inputs(
        self,
        q: Float[Array, "batch seq head head_dim"],
        k: Float[Array, "batch seq kv_head head_dim"] | None,
        v: Float[Array, "batch seq kv_head value_dim"] | None,
        tokens: TokenInfo,
        scale: float | None = None,
    ) -> AttentionInputs:
        """The inputs of the cache, or of the kernel if there is no cache, for a block of rows (see `heads`).

        Args:
            k, v: keys and values; None if the attention has no projections for them.
            scale: multiplies the logits; None: `config.scale`, or `1 / sqrt(head_dim)`.
        """
        cfg = self.config
        scale = cfg.scale if scale is None else scale
        here, cached = dataclasses.replace(tokens, cached=None), None if tokens.cached is None else tokens.rows
        if cached is not None and k is not None and v is not None:
            k, v = isolate_nan(k, v)
        return AttentionInputs(
            q,
            None if k is None or v is None else Contiguous(k, v, here),
            here,
            sinks=None if self.sinks is None else self.sinks[...],
            bias=None if self.bias is None else Bias.of(self.bias, self.frame, "bias"),
            dropout=Dropout(self.rng("dropout"), None, None, cfg.dropout) if cfg.dropout and self.training else None,
            cached=cached,
            scale=1 / math.sqrt(q.shape[3]) if scale is None else scale,
            mask=cfg.mask,
            softcap=cfg.softcap,
            training=self.frame.mode is True,
            phase="train" if cached is None else cached.phase,
        )

    def positioned(
        self,
        q: Float[Array, "batch seq head head_dim"],
        k: Float[Array, "batch seq kv_head head_dim"] | None,
        tokens: TokenInfo,
    ) -> tuple[Float[Array, "batch seq head head_dim"], Float[Array, "batch seq kv_head head_dim"] | None]:
        """Queries and keys with the position embedding. It sees each block of rows, since it may depend on the length
        of a row."""
        if self.position is None:
            return q, k
        keys = (None,) * len(tokens.blocks) if k is None else tokens.split(k)
        position, parts = self.position, list(zip(tokens.split(q), keys, tokens.blocks, strict=True))
        found = self.frame.map(lambda part: position(*part[:2], part[2].positions, part[2].positions), parts)
        return tokens.join([q for q, _ in found]), k if k is None else tokens.join([k for _, k in found])

    def heads(
        self,
        q: Float[Array, "batch seq head head_dim"],
        k: Float[Array, "batch seq kv_head head_dim"] | None,
        v: Float[Array, "batch seq kv_head value_dim"] | None,
        tokens: TokenInfo,
        attend: Callable[[AttentionInputs], Heads] | None = None,
        scale: float | None = None,
    ) -> Heads:
        """Calls the cache, if there is one, and computes attention, for each block of rows (see `TokenInfo.blocks`).

        Args:
            attend: computes the heads from what the cache returns; None: the method `attend`.
            k, v, scale: see `inputs`.
        """
        none = (None,) * len(tokens.blocks)
        keys, values = (none if x is None else tokens.split(x) for x in (k, v))
        parts = zip(tokens.split(q), keys, values, tokens.blocks, strict=True)
        blocks = tuple(self.inputs(*part, scale) for part in parts)
        answers = blocks if self.cache is None else self.cache.answer_blocks(blocks)
        run = self.attend if attend is None else attend
        found = self.frame.map(lambda each: run(each) if isinstance(each, AttentionInputs) else each, answers)
        return tokens.join(found)

    def attend(self, inputs: AttentionInputs) -> Heads:
        """Runs the kernel."""
        return attend(self.kernel, inputs.replace(cached=None))[0]

    def project(self, x: Hidden, heads: Heads) -> Hidden:
        """Applies the `output` slot and the output projection. `x` is the input of the layer."""
        if self.output is not None:
            heads = self.output(x, heads)
        return checkpoint_name(self.projection(rearrange(heads, "b s n d -> b s (n d)")), "projection")
