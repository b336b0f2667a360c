"""The hidden states of a model for drafters: kept by its decoder for every token of a slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from axcore.config import ConfigError
from axcore.infer.decoding.decoder import Decoder
from axcore.infer.decoding.model import state_shardings
from axcore.module import Functional, Layer, Tree
from axcore.nn import TokenInfo

NAME = "hidden_states"
"""The entry of the model's state: [slots, max_len, embed], the result of the layer `decoder` for each token."""


def keeping_hidden_states(decoder: Decoder, state: Tree, model: Layer) -> tuple[Decoder, Tree]:
    """A decoder that also keeps hidden states, and its initial state. Its rows cannot share prefixes, since hidden
    states have no pages.

    Args:
        decoder, state: a decoder of the model, and its initial state.
        model: a model with the layers `embedding` and `decoder`, such as `axcore.nn.CausalLM`.
    """
    dim, dtype = getattr(model.config, "dim", None), getattr(getattr(model, "decoder", None), "dtypes", None)
    if dim is None or dtype is None:
        raise ConfigError(
            f"engine.speculation reads the hidden states of the layer `decoder`, but {type(model).__name__} has none. "
            f"Use a model such as CausalLM, or another drafter"
        )
    axes = decoder.state_axes | {"model": decoder.state_axes["model"] | {NAME: ("batch", None, None)}}
    kept = jnp.zeros((decoder.batch_size, decoder.max_len, dim), dtype.compute)
    if decoder.layout is not None:
        kept = jax.device_put(kept, state_shardings(decoder.layout, {NAME: kept}, {NAME: ("batch", None, None)})[NAME])
    new = dataclasses.replace(
        decoder, fn=_Keeping(**vars(decoder.fn)), state_axes=axes, shares_prefixes=False, has_hidden_states=False
    )
    return new, state | {"model": state["model"] | {NAME: kept}}


class _Keeping(Functional):
    """A model that stores the results of its layer `decoder` by slot and position."""

    def __call__(self, params: Tree, state: Tree, *args: Any, **kwargs: Any) -> Any:  # Any: as in `Functional`
        own = {name: value for name, value in state.items() if name != NAME}
        result, new = super().__call__(params, own, *args, capture=("decoder",), **kwargs)
        kept, names = state[NAME], ("index", "positions", "valid", "cached")
        tokens = TokenInfo(**{name: kwargs[name] for name in names})
        for block, hidden in zip(tokens.blocks, tokens.split(result[1].outputs["decoder"]), strict=True):
            slots = jnp.arange(hidden.shape[0]) if block.rows.slots is None else block.rows.slots
            place = block.index if block.valid is None else jnp.where(block.valid, block.index, kept.shape[1])
            kept = kept.at[slots[:, None], place].set(hidden.astype(kept.dtype), mode="drop")
        return result, new | {NAME: kept}
