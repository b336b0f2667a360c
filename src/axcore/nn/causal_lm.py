"""A causal language model and its objective."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, at_least
from axcore.module import Layer, Rngs, method
from axcore.nn.embedding import Embedding
from axcore.nn.linear import Linear
from axcore.nn.norm import RMSNorm
from axcore.nn.tokens import TokenInfo
from axcore.nn.transformer import Repeat
from axcore.parallel import constrain

Batch = Mapping[str, jax.Array]


class CausalLM(Layer):
    """Embedding, decoder, norm, head."""

    class Config(Layer.Config):
        vocab_size: int = REQUIRED
        dim: int = REQUIRED
        embedding: Embedding.Config = Embedding.Config()
        decoder: Layer.Config = Repeat.Config()
        norm: Layer.Config = RMSNorm.Config()
        head: Linear.Config | None = Linear.Config()
        """None: the embedding serves as head too (tied)."""
        z_loss: float = 0.0
        """Weight of the mean squared log-partition (PaLM, arXiv 2204.02311, section 5); 0 leaves it out."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        at_least(cfg, 1, "vocab_size", "dim")
        self.embedding = self.child("embedding", cfg.embedding, rngs, vocab_size=cfg.vocab_size, output_dim=cfg.dim)
        self.decoder = self.child("decoder", cfg.decoder, rngs, input_dim=cfg.dim)
        self.norm = self.child("norm", cfg.norm, rngs, input_dim=cfg.dim)
        wide = {"input_dim": cfg.dim, "output_dim": cfg.vocab_size, "axes": ("embed", "vocab")}
        self.head = self.child("head", cfg.head, rngs, **wide)

    def __call__(
        self,
        ids: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        index: jax.Array | None = None,
        valid: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the next token.

        Args:
            ids: int [batch, seq].
            positions, segment_ids: int [batch, seq], for packed rows (see `TokenInfo`).
            index: int [batch or 1, seq], the places in the rows, where ids go on after those of an earlier call.
            valid: bool [batch, seq], false at padding, which no token then sees.

        Returns:
            float32 [batch, seq, vocab_size].
        """
        tokens = TokenInfo.of(ids, positions, segment_ids, index, valid)
        x = constrain(self.embedding(ids), "batch", "seq", "embed_activation")
        x = self.norm(self.decoder(x, tokens))
        logits = self.embedding.attend(x) if self.head is None else self.head(x)
        return logits.astype(jnp.float32)

    @method
    def token_losses(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy of each target in nats, and the log-partition: both float32 [batch, seq]."""
        logits = self(batch["inputs"], batch.get("positions"), batch.get("segment_ids"))
        log_z = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return log_z - picked, log_z

    @method
    def loss(self, batch: Batch) -> jax.Array:
        """The mean cross-entropy of the targets that count, in nats; a z-loss is added to the objective beside it.

        Args:
            batch: `inputs`, `targets` int [batch, seq]; `weights` float [batch, seq], 0 where a target does not count;
                `positions`, `segment_ids` where rows are packed.
        """
        losses, log_z = self.token_losses(batch)
        weights = batch["weights"]
        count = weights.sum()
        count = jnp.where(count == 0, 1.0, count)
        if self.config.z_loss:
            self.add_loss("z_loss", (jnp.square(log_z) * weights).sum() / count, self.config.z_loss)
        # A target that does not count may be any number (-1 or -100 by custom), and its loss is then not finite.
        return jnp.where(weights == 0, 0.0, losses * weights).sum() / count
