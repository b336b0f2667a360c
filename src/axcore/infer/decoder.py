"""A model that goes on from where its last call ended."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from axcore.config import ConfigError
from axcore.module import DecodingState, Functional, Layer, Rngs, Tree, functional
from axcore.nn import CachedRows, KVCache, Phase, TokenInfo, for_decoding, unstack_arrays, unstacked
from axcore.parallel import Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """Some tokens of some rows, which follow what those rows hold.

    A row may bring a prompt, a part of one, a single token, or several that are to be verified. To take tokens back,
    start the next step at an earlier place: what the caches hold from there on is no longer part of the row.

    Attributes:
        ids: the tokens, padded at the end.
        start: the place of the first token of each row; 0 starts the row over.
        lengths: how many of `ids` are tokens; None: all.
        slots: the slot that each row of the step belongs to, each at most once; None: row i is slot i, and there are
            as many as slots.
        logits_at: after which of `ids` logits are wanted, counted from 0; None: after each.
        pages: the page table of each row, for caches that are told one.
        phase: None: `decode` where each row brings one token, otherwise `prefill`.
    """

    ids: Int[Array, "batch width"]
    start: Int[Array, " batch"]
    lengths: Int[Array, " batch"] | None = None
    slots: Int[Array, " batch"] | None = None
    logits_at: Int[Array, "batch logits"] | None = None
    pages: Int[Array, "batch pages_per_row"] | None = None
    phase: Phase | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        if not hasattr(self.ids, "ndim"):
            return  # a pytree of something else than arrays
        batch = self.ids.shape[:1]
        wanted = {"start": batch, "lengths": batch, "slots": batch}
        if self.ids.ndim != 2 or self.ids.shape[1] == 0:
            raise ConfigError(f"Step.ids must be [batch, width] with at least one token, got shape {self.ids.shape}")
        for name, shape in wanted.items():
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise ConfigError(f"Step.{name} must have the shape {shape}, one number a row; got {array.shape}")
        if self.logits_at is not None and (self.logits_at.ndim != 2 or self.logits_at.shape[:1] != batch):
            raise ConfigError(f"Step.logits_at must be [batch, logits], got shape {self.logits_at.shape}")


@dataclasses.dataclass(frozen=True, eq=False)
class Decoder:
    """A causal language model whose layers keep what they computed, as a pure function of arrays.

    ```python
    decoder, params, state = Decoder.of(model, cache=ContiguousCache.Config(), batch_size=2, max_len=64)
    logits, state = decoder(params, state, Step(prompts, start=zeros, lengths=lengths))
    logits, state = decoder(params, state, Step(token[:, None], start=lengths))
    ```

    Jit it and donate `state`: the caches are then written in place.

    Attributes:
        fn: the model.
        state_axes: the logical axes of every array of the state.
        layout: where parameters and state lie; None: on one device.
    """

    fn: Functional
    state_axes: Tree
    batch_size: int
    max_len: int
    layout: Layout | None = None

    @classmethod
    def of(
        cls,
        model: nnx.Module,
        *,
        cache: KVCache.Config,
        batch_size: int,
        max_len: int,
        layout: Layout | None = None,
        unstack: bool = True,
    ) -> tuple[Decoder, Tree, Tree]:
        """(decoder, parameters, state before the first token) of a model that was built for training.

        Args:
            model: called as `axcore.nn.CausalLM` is.
            cache: for every attention that has none yet.
            batch_size: slots: rows that are kept at once.
            max_len: tokens in a row, prompt included.
            layout: the mesh that parameters and state lie on.
            unstack: give each layer arrays of its own, copied out of those of a scanned stack once. A stack that stays
                stacked compiles faster and decodes slower: each token copies each layer's weights out of it.

        Raises:
            ConfigError: nothing in the model keeps anything between calls.
        """
        if not isinstance(model, Layer):
            raise ConfigError(f"a Decoder is made of a layer that a config built, not of {type(model).__name__}")
        cfg = model.config
        params = functional(model)[1]
        # What its own caches hold, if it has any, is of other sizes and of other rows.
        held = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Any(nnx.Param, DecodingState))))
        if unstack:
            params, held = unstack_arrays(cfg, params), unstack_arrays(cfg, held)
            cfg = unstacked(cfg)
        cfg = for_decoding(cfg, batch_size=batch_size, max_len=max_len, cache=cache)
        fn, state = _empty(cfg, type(model).__name__, batch_size, layout)
        state["model"] = _merged(state["model"], held)
        axes = {"lengths": ("batch",), "model": fn.state_axes}
        return cls(fn, axes, batch_size, max_len, layout), _those_of(fn.axes, params), state

    def __call__(self, params: Tree, state: Tree, step: Step) -> tuple[Float[Array, "batch logits vocab"], Tree]:
        """The logits that the step asks for, and the state with its tokens in it.

        Logits after a token that could not be stored (beyond `max_len`), or that leaves a gap in its row, are NaN.
        """
        width, held = step.ids.shape[1], state["lengths"]
        counts = jnp.full(step.start.shape, width, jnp.int32) if step.lengths is None else step.lengths
        end = step.start + counts
        index = step.start[:, None] + jnp.arange(width, dtype=jnp.int32)
        places = jnp.arange(self.max_len, dtype=jnp.int32)[None]
        cached = CachedRows(
            tokens=TokenInfo(places, places, valid=places < end[:, None]),
            lengths=end,
            slots=step.slots,
            pages=step.pages,
            phase=step.phase or ("decode" if width == 1 else "prefill"),
        )
        valid = None if step.lengths is None else jnp.arange(width) < counts[:, None]
        with self.layout.active() if self.layout is not None else contextlib.nullcontext():
            (logits, _), model = self.fn(
                params,
                state["model"],
                step.ids,
                index=index,
                valid=valid,
                cached=cached,
                logits_at=step.logits_at,
            )
        asked = index if step.logits_at is None else jnp.take_along_axis(index, step.logits_at, axis=1)
        before = held if step.slots is None else held[step.slots]
        right = (asked >= 0) & (asked < self.max_len) & (step.start <= before)[:, None]
        lengths = end if step.slots is None else held.at[step.slots].set(end, mode="drop")
        return jnp.where(right[..., None], logits, jnp.nan), {"lengths": lengths, "model": model}


def _empty(cfg: Any, name: str, batch_size: int, layout: Layout | None) -> tuple[Functional, Tree]:
    """The decoding model and its state before the first token, made where it belongs."""
    built: list[Functional] = []

    def empty(key: jax.Array) -> Tree:  # the parameters that are made here are never computed
        module = cfg.build(rngs=Rngs(key))
        if not any(isinstance(node, DecodingState) for _, node in nnx.iter_graph(module)):
            raise ConfigError(
                f"nothing in {name} keeps what it computed for the next call: no config in it has a method "
                f"for_decoding, as Attention.Config has"
            )
        fn, _, state = functional(module)
        built.append(fn)
        return {"lengths": jnp.zeros((batch_size,), jnp.int32), "model": state}

    key = jax.random.key(0)
    if layout is None:
        state = jax.jit(empty)(key)
        return built[0], state
    shapes = jax.eval_shape(empty, key)
    axes = {"lengths": ("batch",), "model": built[0].state_axes}
    return built[0], jax.jit(empty, out_shardings=layout.shardings(shapes, axes))(key)


def _those_of(wanted: Tree, params: Tree) -> Tree:
    """Of the parameters, those that decoding reads."""
    return {
        name: _those_of(below, params[name]) if isinstance(below, dict) else params[name]
        for name, below in wanted.items()
    }


def _merged(fresh: Tree, held: Tree) -> Tree:
    """The state of the decoding model, with what the trained one holds at the same paths."""
    merged: dict[str, Any] = {}
    for name, value in fresh.items():
        if isinstance(value, dict):
            merged[name] = _merged(value, held.get(name, {}))
        else:
            merged[name] = held.get(name, value)
    return merged
