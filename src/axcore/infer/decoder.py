"""A model that goes on from where its last call ended."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from axcore.config import ConfigError
from axcore.module import Functional, Layer, Rngs, Tree, functional
from axcore.nn import DecodingState, KVCache, for_decoding


@dataclasses.dataclass(frozen=True, eq=False)
class Decoder:
    """A causal language model whose layers keep what they computed, as a pure function of arrays.

    ```python
    decoder, params, state = Decoder.of(model, cache=ContiguousCache.Config(), batch_size=2, max_len=64)
    logits, state = decoder(params, state, prompt, index)           # prefill, at once or in pieces
    logits, state = decoder(params, state, token[:, None], length[:, None])   # one token each
    ```

    Jit it and donate `state`: the caches are then written in place.

    Attributes:
        fn: the model; `fn.state_axes` has the logical axes of every array of the state.
    """

    fn: Functional
    batch_size: int
    max_len: int

    @classmethod
    def of(
        cls, model: nnx.Module, *, cache: KVCache.Config, batch_size: int, max_len: int
    ) -> tuple[Decoder, Tree, Tree]:
        """(decoder, parameters, state before the first token) of a model that was built for training.

        Args:
            model: called as `axcore.nn.CausalLM` is.
            cache: for every attention that has none yet.
            batch_size: rows that are decoded together.
            max_len: tokens in a row, prompt included.

        Raises:
            ConfigError: nothing in the model keeps anything between calls.
        """
        if not isinstance(model, Layer):
            raise ConfigError(f"a Decoder is made of a layer that a config built, not of {type(model).__name__}")
        params = functional(model)[1]
        held = nnx.to_pure_dict(nnx.split(model, nnx.Param, DecodingState, ...)[3])  # type: ignore[misc]
        cfg = for_decoding(model.config, batch_size=batch_size, max_len=max_len, cache=cache)
        built: list[Functional] = []

        def empty(key: jax.Array) -> Tree:  # the parameters that are made here are never computed
            module = cfg.build(rngs=Rngs(key))
            if not any(isinstance(node, DecodingState) for _, node in nnx.iter_graph(module)):
                raise ConfigError(
                    f"nothing in {type(model).__name__} keeps what it computed for the next call: no config in it has "
                    f"a method for_decoding, as Attention.Config has"
                )
            fn, _, state = functional(module)
            built.append(fn)
            return state

        fresh = jax.jit(empty)(jax.random.key(0))
        return cls(built[0], batch_size, max_len), params, _merged(fresh, held)

    def __call__(
        self, params: Tree, state: Tree, ids: jax.Array, index: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, Tree]:
        """The logits after each of these tokens, and the state with them in it.

        Args:
            ids: int [batch, seq].
            index: int [batch or 1, seq], the place of each in its row. What stood there before is forgotten.
            valid: bool [batch, seq], false at padding; None where there is none.

        Returns:
            float32 [batch, seq, vocab_size], and the new state.
        """
        for name, array in (("ids", ids), ("index", index)):
            if array.ndim != 2 or array.shape[1] == 0 or array.shape[1] != ids.shape[1]:
                raise ConfigError(f"{name} must be [batch, seq] with at least one token, not of shape {array.shape}")
        (logits, _), state = self.fn(params, state, ids, index=index, valid=valid)
        return logits, state


def _merged(fresh: Tree, held: Tree) -> Tree:
    """The state of the decoding model, with what the trained one holds at the same paths."""
    merged: dict[str, Any] = {}
    for name, value in fresh.items():
        if isinstance(value, dict):
            merged[name] = _merged(value, held.get(name, {}))
        else:
            merged[name] = held.get(name, value)
    return merged
