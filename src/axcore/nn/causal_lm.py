"""A causal language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from axcore.config import REQUIRED, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from axcore.module import Layer, Rngs, method
from axcore.nn.dropout import dropout
from axcore.nn.embedding import Embedding
from axcore.nn.kv.cache import KVCache
from axcore.nn.linear import Linear
from axcore.nn.multi_token import MultiTokenPrediction, shifted
from axcore.nn.norm import RMSNorm
from axcore.nn.tokens import CachedBlocks, CachedRows, TokenInfo, take_tokens
from axcore.nn.transformer import Repeat
from axcore.parallel import constrain

Batch = Mapping[str, jax.Array]
MASKED_LOGIT = -1e30
"""The logit of vocabulary padding. It is finite, so its product with 0 is 0."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prediction:
    """Hidden states and the tokens that they predict.

    Attributes:
        name: `next`, or `future.0` and so on.
        hidden: hidden states after the norm, the input of `CausalLM.logits`.
        targets: token ids; arbitrary if the weight is 0.
        weights: weight of each target in the mean loss.
        loss_weight: weight of the mean loss of this prediction in the objective.
    """

    name: str = dataclasses.field(metadata={"static": True})
    hidden: Float[Array, "batch seq embed"]
    targets: Int[Array, "batch seq"]
    weights: Float[Array, "batch seq"]
    loss_weight: float = dataclasses.field(default=1.0, metadata={"static": True})


class CausalLM(Layer):
    """A language model: embedding, decoder, norm and head.

    Slots, empty unless a feature fills them:

    - `position`: `(x, positions) -> x`, a position embedding that is applied to the token embeddings [batch, seq,
      embed], such as learned positions;
    - `future`: modules for multi-token prediction while training (see `MultiTokenPrediction`).
    """

    class Config(Layer.Config):
        vocab_size: PositiveInt = REQUIRED
        dim: PositiveInt = REQUIRED
        embedding: Embedding.Config = Embedding.Config()
        position: Layer.Config | None = None
        dropout: Fraction = 0.0
        """Probability of zeroing each feature of the embeddings while training."""
        decoder: Layer.Config = Repeat.Config()
        norm: Layer.Config = RMSNorm.Config()
        head: Linear.Config | None = Linear.Config()
        """Output head; None: tied to the embedding."""
        logit_scale: PositiveFloat = 1.0
        """Factor of the logits, before `softcap` (Cohere; Granite divides by `logits_scaling`)."""
        softcap: PositiveFloat | None = None
        """Bounds the logits: `softcap * tanh(logits / softcap)` (Gemma 2, arXiv 2408.00118, section 2)."""
        pad_vocab_to: PositiveInt = 1
        """Rounds the number of rows of embedding and head up to a multiple of this, so that devices get equal shards.
        The logits of the padding are masked."""
        future: tuple[MultiTokenPrediction.Config, ...] = ()
        """Modules for multi-token prediction. The first predicts the token after the next one, and so on (DeepSeek-V3,
        arXiv 2412.19437, section 2.2)."""
        future_weight: NonNegativeFloat = 0.3
        """Weight of the mean loss of the modules in `future`."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> CausalLM.Config:
            """Removes the modules that only training uses."""
            return self.set(future=())

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        rows = -(-cfg.vocab_size // cfg.pad_vocab_to) * cfg.pad_vocab_to
        self.embedding = self.child("embedding", cfg.embedding, rngs, vocab_size=rows, output_dim=cfg.dim)
        self.position = self.child("position", cfg.position, rngs, input_dim=cfg.dim)
        self.decoder = self.child("decoder", cfg.decoder, rngs, input_dim=cfg.dim)
        self.norm = self.child("norm", cfg.norm, rngs, input_dim=cfg.dim)
        widths = {"input_dim": cfg.dim, "output_dim": rows, "axes": ("embed", "vocab")}
        self.head = self.child("head", cfg.head, rngs, **widths)
        self.future = self.children("future", cfg.future, rngs, input_dim=cfg.dim)

    def __call__(
        self,
        ids: Int[Array, "batch seq"],
        positions: Int[Array, "batch_or_1 seq *coordinates"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        index: Int[Array, "batch_or_1 seq"] | None = None,
        valid: Bool[Array, "batch_or_1 seq"] | None = None,
        cached: CachedRows | CachedBlocks | None = None,
        logits_at: Int[Array, "batch logits"] | None = None,
    ) -> Float[Array, "batch seq_or_logits vocab"]:
        """The float32 logits of the next token, without the padding of the vocabulary.

        Args:
            ids: the tokens.
            positions, segment_ids: position and document of each token, for packed rows (see `TokenInfo`).
            index: positions in the rows; None: 0, 1, ...
            valid: false at padding, which no token attends to.
            cached: the cached rows that the ids continue, in several blocks if the ids are flat; None unless decoding.
            logits_at: indices into `seq` of the tokens whose logits are computed; None: all.
        """
        tokens = TokenInfo.of(ids, positions, segment_ids, index, valid, cached)
        hidden = self.decoder(self._embed(ids, tokens), tokens)
        if logits_at is not None:
            hidden = take_tokens(hidden, logits_at)
        return self.logits(self.norm(hidden))[..., : self.config.vocab_size]

    @method
    def predictions(self, batch: Batch) -> tuple[Prediction, ...]:
        """The predictions that an objective scores: first the next token, then those of `future`.

        Args:
            batch: `inputs`, `targets`: int [batch, seq]; `weights`: float [batch, seq], 0 for targets to ignore; and,
                if rows are packed, `positions` and `segment_ids`: int [batch, seq].
        """
        tokens = TokenInfo.of(batch["inputs"], batch.get("positions"), batch.get("segment_ids"))
        hidden = self.decoder(self._embed(batch["inputs"], tokens), tokens)
        found = [Prediction("next", self.norm(hidden), batch["targets"], batch["weights"])]
        for ahead, module in enumerate(self.future, 1):
            inputs, targets, counted = (shifted(batch[each], ahead) for each in ("inputs", "targets", "weights"))
            if tokens.segment_ids is not None:  # targets in the next document are ignored
                counted = jnp.where(shifted(tokens.segment_ids, ahead) == tokens.segment_ids, counted, 0)
            hidden = module(hidden, self._embed(inputs, tokens), tokens)
            weight = self.config.future_weight / len(self.future)
            found.append(Prediction(f"future.{ahead - 1}", module.normed(hidden), targets, counted, weight))
        return tuple(found)

    @method
    def logits(self, hidden: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq padded_vocab"]:
        """The float32 logits over the padded vocabulary (see `pad_vocab_to`). Those of the padding are `MASKED_LOGIT`.

        Args:
            hidden: hidden states after the norm, such as `Prediction.hidden`.
        """
        cfg = self.config
        logits = (self.embedding.attend(hidden) if self.head is None else self.head(hidden)).astype(jnp.float32)
        if cfg.logit_scale != 1.0:
            logits = cfg.logit_scale * logits
        if cfg.softcap is not None:
            logits = cfg.softcap * jnp.tanh(logits / cfg.softcap)
        if logits.shape[-1] > cfg.vocab_size:  # slicing would reshard a sharded dimension
            logits = jnp.where(jnp.arange(logits.shape[-1]) < cfg.vocab_size, logits, MASKED_LOGIT)
        return constrain(logits, "batch", "seq", "vocab")

    def _embed(self, ids: Int[Array, "batch seq"], tokens: TokenInfo) -> Float[Array, "batch seq embed"]:
        x = constrain(self.embedding(ids), "batch", "seq", "embed_activation")
        if self.position is not None:
            x = self.position(x, tokens.positions)
        return dropout(self, x, self.config.dropout)
