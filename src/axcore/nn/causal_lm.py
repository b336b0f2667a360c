"""A causal language model and its objective."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, ConfigError, at_least
from axcore.module import Layer, Rngs, method
from axcore.nn.dropout import check_rates, dropout
from axcore.nn.embedding import Embedding
from axcore.nn.kv.cache import KVCache
from axcore.nn.linear import Linear
from axcore.nn.multi_token import FutureToken, shifted
from axcore.nn.norm import RMSNorm
from axcore.nn.pieces import in_pieces
from axcore.nn.tokens import CachedRows, TokenInfo
from axcore.nn.transformer import Repeat
from axcore.parallel import constrain

Batch = Mapping[str, jax.Array]


class CausalLM(Layer):
    """Embedding, decoder, norm, head.

    Slots, empty unless a feature fills them:

    - `position`: `(x, positions) -> x`, acts on the embeddings [batch, seq, dim], such as learned positions;
    - `future`: modules that predict tokens further ahead while training (see `FutureToken`).
    """

    class Config(Layer.Config):
        vocab_size: int = REQUIRED
        dim: int = REQUIRED
        embedding: Embedding.Config = Embedding.Config()
        position: Layer.Config | None = None
        dropout: float = 0.0
        """Chance of each embedded feature to be zeroed while training."""
        decoder: Layer.Config = Repeat.Config()
        norm: Layer.Config = RMSNorm.Config()
        head: Linear.Config | None = Linear.Config()
        """None: the embedding serves as head too (tied)."""
        softcap: float | None = None
        """Bounds the logits smoothly: `softcap * tanh(logits / softcap)` (Gemma 2, arXiv 2408.00118, section 2)."""
        pad_vocab_to: int = 1
        """The tables have rows up to the next multiple of this, so that they divide over devices. Nothing sees them."""
        z_loss: float = 0.0
        """Weight of the mean squared log-partition (PaLM, arXiv 2204.02311, section 5); 0 leaves it out."""
        loss_chunk: int | None = None
        """Places of each row whose logits exist at once in the loss; the backward pass makes them again. None: all."""
        future: tuple[FutureToken.Config, ...] = ()
        """The first predicts the token after the next, and so on (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""
        future_weight: float = 0.3
        """Weight of the mean of their losses."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> CausalLM.Config:
            """Without the modules that only training needs."""
            return self.set(future=())

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        at_least(cfg, 1, "vocab_size", "dim", "pad_vocab_to", "loss_chunk")
        check_rates(cfg, "dropout")
        if cfg.softcap is not None and not cfg.softcap > 0:
            raise ConfigError(f"softcap must be positive or None, not {cfg.softcap}")
        rows = -(-cfg.vocab_size // cfg.pad_vocab_to) * cfg.pad_vocab_to
        self.embedding = self.child("embedding", cfg.embedding, rngs, vocab_size=rows, output_dim=cfg.dim)
        self.position = self.child("position", cfg.position, rngs, input_dim=cfg.dim)
        self.decoder = self.child("decoder", cfg.decoder, rngs, input_dim=cfg.dim)
        self.norm = self.child("norm", cfg.norm, rngs, input_dim=cfg.dim)
        wide = {"input_dim": cfg.dim, "output_dim": rows, "axes": ("embed", "vocab")}
        self.head = self.child("head", cfg.head, rngs, **wide)
        self.future = self.children("future", cfg.future, rngs, input_dim=cfg.dim)

    def __call__(
        self,
        ids: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        index: jax.Array | None = None,
        valid: jax.Array | None = None,
        cached: CachedRows | None = None,
        logits_at: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the next token.

        Args:
            ids: int [batch, seq].
            positions, segment_ids: int [batch, seq], for packed rows (see `TokenInfo`).
            index: int [batch or 1, seq], the places in the rows, where ids go on after those of an earlier call.
            valid: bool [batch, seq], false at padding, which no token then sees.
            cached: the rows that the ids continue, while decoding.
            logits_at: int [batch, logits], the places among `ids` after which logits are wanted; None: after each.

        Returns:
            float32 [batch, seq or logits, vocab_size].
        """
        tokens = TokenInfo.of(ids, positions, segment_ids, index, valid, cached)
        hidden = self.decoder(self._embed(ids, tokens), tokens)
        if logits_at is not None:
            hidden = jnp.take_along_axis(hidden, logits_at[:, :, None], axis=1)
        return self._logits(self.norm(hidden))

    @method
    def token_losses(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy of each target in nats, and the log-partition: both float32 [batch, seq]."""
        return self._cross_entropy(self.norm(self._hidden(batch)[0]), batch["targets"])

    @method
    def loss(self, batch: Batch) -> jax.Array:
        """The mean cross-entropy of the targets that count, in nats; other losses are added to the objective beside it:
        the z-loss, and that of tokens further ahead.

        Args:
            batch: `inputs`, `targets` int [batch, seq]; `weights` float [batch, seq], 0 where a target does not count;
                `positions`, `segment_ids` where rows are packed.
        """
        hidden, tokens = self._hidden(batch)
        weights = batch["weights"]
        losses, log_z = self._cross_entropy(self.norm(hidden), batch["targets"])
        if self.config.z_loss:
            self.add_loss("z_loss", _mean(jnp.square(log_z), weights), self.config.z_loss)
        further = []
        for ahead, module in enumerate(self.future, 1):
            inputs, targets, counted = (shifted(batch[each], ahead) for each in ("inputs", "targets", "weights"))
            if tokens.segment_ids is not None:  # no document predicts the next one
                counted = jnp.where(shifted(tokens.segment_ids, ahead) == tokens.segment_ids, counted, 0)
            hidden = module(hidden, self._embed(inputs, tokens), tokens)
            further.append(_mean(self._cross_entropy(module.normed(hidden), targets)[0], counted))
        if further:
            self.add_loss("future", sum(further) / len(further), self.config.future_weight)
        return _mean(losses, weights)

    def _embed(self, ids: jax.Array, tokens: TokenInfo) -> jax.Array:
        x = constrain(self.embedding(ids), "batch", "seq", "embed_activation")
        if self.position is not None:
            x = self.position(x, tokens.positions)
        return dropout(self, x, self.config.dropout)

    def _hidden(self, batch: Batch) -> tuple[jax.Array, TokenInfo]:
        """What the decoder makes of a batch, [batch, seq, dim], before the norm."""
        tokens = TokenInfo.of(batch["inputs"], batch.get("positions"), batch.get("segment_ids"))
        return self.decoder(self._embed(batch["inputs"], tokens), tokens), tokens

    def _logits(self, x: jax.Array) -> jax.Array:
        """[batch, seq, dim] -> float32 [batch, seq, vocab_size]."""
        cfg = self.config
        logits = (self.embedding.attend(x) if self.head is None else self.head(x)).astype(jnp.float32)
        logits = constrain(logits, "batch", "seq", "vocab")
        logits = logits[..., : cfg.vocab_size]
        return logits if cfg.softcap is None else cfg.softcap * jnp.tanh(logits / cfg.softcap)

    def _cross_entropy(self, x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[batch, seq, dim], int [batch, seq] -> as `token_losses`."""

        def of_piece(self: CausalLM, x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = self._logits(x)
            log_z = jax.nn.logsumexp(logits, axis=-1)
            return log_z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0], log_z

        chunk = self.config.loss_chunk
        if chunk is None or chunk >= x.shape[1]:
            return of_piece(self, x, targets)
        return in_pieces(of_piece, chunk)(self, x, targets)


def _mean(losses: jax.Array, weights: jax.Array) -> jax.Array:
    """The mean of the losses that count; 0 where none does."""
    count = weights.sum()
    # A target that does not count may be any number (-1 or -100 by custom), and its loss is then not finite.
    return jnp.where(weights == 0, 0.0, losses * weights).sum() / jnp.where(count == 0, 1.0, count)
