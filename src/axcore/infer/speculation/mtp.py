"""Drafts of the model's own module for multi-token prediction."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from axcore.config import REQUIRED, Config, ConfigError, PositiveInt
from axcore.infer.decoding.step import Step
from axcore.infer.speculation.drafter import Target
from axcore.infer.speculation.hidden_states import NAME
from axcore.infer.speculation.model_drafter import ModelDrafter
from axcore.module import DecodingState, Layer, Rngs, Tree, abstract, functional
from axcore.nn import CausalLM, MultiTokenPrediction, TokenInfo


class MTP(ModelDrafter):
    """Drafts the tokens that the first module of `CausalLM.Config.future` predicts (DeepSeek-V3, arXiv 2412.19437,
    section 2.2).

    For more than one draft, the module continues with its own hidden states and drafts. The engine keeps the hidden
    states of the model for all tokens of its rows, so prompts cannot share prefixes.
    """

    class Config(ModelDrafter.Config):
        num_speculative_tokens: PositiveInt = 1

        @property
        def num_new(self) -> int:
            """See `ModelDrafter`: the last token, and the drafts before it that were accepted."""
            return 1 + self.num_speculative_tokens

        @property
        def reads_hidden_states(self) -> bool:
            return True

    config: Config
    shift: ClassVar[int] = 1  # the module reads the token after each hidden state
    keeps_drafts: ClassVar[bool] = False  # those have hidden states of the module

    def __init__(self, cfg: Config, target: Target):
        model = _module(target, target.decoder.max_len + cfg.num_speculative_tokens)
        super().__init__(cfg, target, model, cfg.num_new)
        self._read = target.state

    def inputs(self) -> Tree:
        """The hidden states of the model."""
        return {NAME: self._read()["model"][NAME]}

    def prepared(self, state: Tree, inputs: Tree, step: Step) -> Tree:
        """Copies the hidden states of the new tokens."""
        model, given = state["model"], inputs[NAME]
        kept = model["decoder"][NAME]
        width, slots = step.ids.shape[1], jnp.arange(kept.shape[0]) if step.slots is None else step.slots
        assert step.lengths is not None
        at = jnp.arange(width)
        place = jnp.where(at < step.lengths[:, None], step.start[:, None] + at, kept.shape[1])
        rows = slots[:, None], place
        copied = kept.at[rows].set(given.at[rows].get(mode="fill", fill_value=0), mode="drop")
        return state | {"model": model | {"decoder": model["decoder"] | {NAME: copied}}}


class _FromHiddenStates(Layer):
    """A module for multi-token prediction in place of the decoder of a model. It reads the hidden state of each token
    from its state, and writes the result as that of the next token."""

    class Config(Layer.Config):
        input_dim: PositiveInt = REQUIRED
        batch_size: PositiveInt = REQUIRED
        max_len: PositiveInt = REQUIRED
        module: MultiTokenPrediction.Config = REQUIRED

        @property
        def max_rollback(self) -> int | None:
            return None

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        self.module = self.child("module", cfg.module, rngs, input_dim=cfg.input_dim)
        shape = cfg.batch_size, cfg.max_len, cfg.input_dim
        self.hidden_states = DecodingState(jnp.zeros(shape, self.dtypes.compute), axes=("batch", None, None))

    def __call__(self, x: Float[Array, "batch seq embed"], tokens: TokenInfo) -> Float[Array, "batch seq embed"]:
        """The hidden states after the module.

        Args:
            x: embeddings of the tokens after those of the hidden states.
            tokens: the tokens of the hidden states.
        """
        slots = jnp.arange(x.shape[0]) if tokens.rows.slots is None else tokens.rows.slots
        index = jnp.broadcast_to(tokens.index, x.shape[:2])
        size = self.config.max_len
        hidden: jax.Array = self.module(self.hidden_states[slots[:, None], jnp.minimum(index, size - 1)], x, tokens)
        after = index + 1 if tokens.valid is None else jnp.where(tokens.valid, index + 1, size)
        self.hidden_states.put((slots[:, None], after), hidden)
        return hidden


def module_as_model(cfg: Config, batch_size: int, max_len: int) -> CausalLM.Config:
    """The first module for multi-token prediction, at the path `decoder.module`, with the embedding and the head of the
    model, as a model of its own.

    Args:
        cfg: the config of the model.
        batch_size: the number of slots.
        max_len: the maximum number of tokens in a row, including drafts.

    Raises:
        ConfigError: the model has no such modules.
    """
    if not isinstance(cfg, CausalLM.Config) or not cfg.future:
        raise ConfigError(
            "engine.speculation: the model has no modules for multi-token prediction (model.future). Use a model that "
            "was trained with them, or another drafter, such as ngram"
        )
    first = cfg.future[0]
    decoder = _FromHiddenStates.Config(batch_size=batch_size, max_len=max_len, module=first)
    return cfg.set(decoder=decoder, norm=first.norm, future=())


def _module(target: Target, max_len: int) -> Layer:
    """`module_as_model` with the arrays of the model."""
    cfg = module_as_model(target.model.config, target.decoder.batch_size, max_len)
    params = functional(target.model)[1]
    future = params["future"][0]
    own: Tree = {name: params[name] for name in ("embedding", "position", "head") if name in params}
    own |= {"decoder": {"module": future}, "norm": future["norm"]}
    fn, _, state = abstract(cfg, "engine.speculation.model")
    made: Layer = fn.bind(own, state)
    return made
