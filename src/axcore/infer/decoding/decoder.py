"""Incremental decoding with KV caches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from axcore.config import Config, ConfigError, walk
from axcore.infer.adapters import Adapters
from axcore.infer.decoding.blocks import block_of, logits_of_blocks, model_inputs
from axcore.infer.decoding.model import (
    empty_state,
    is_paged,
    layers_with_state,
    merged,
    paging_of,
    pruned,
    state_axes,
    state_shardings,
)
from axcore.infer.decoding.step import Step
from axcore.module import DecodingState, Functional, Layer, Tree, abstract, functional
from axcore.nn import (
    KVCache,
    Paging,
    column_major,
    for_decoding,
    fused,
    in_compute_dtype,
    unstack_arrays,
    unstacked,
)
from axcore.nn.attention.heads import check_heads
from axcore.numerics import require_calibrated
from axcore.parallel import Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Decoder:
    """A causal language model with decoding state, such as KV caches, as a pure function.

    ```python
    decoder, params, state = Decoder.of(model, cache=ContiguousCache.Config(), batch_size=2, max_len=64)
    logits, state = decoder(params, state, Step(prompts, start=zeros, lengths=lengths))
    logits, state = decoder(params, state, Step(token[:, None], start=lengths))
    ```

    Several steps may be computed by one call, which reads the weights once, such as a token of each row that decodes
    and a part of a prompt.

    Jit it and donate `state`, so that caches are updated in place.

    Attributes:
        fn: the model.
        state_axes: the logical axes of every array of the state.
        batch_size: the number of rows (slots) in the state.
        max_len: the maximum number of tokens in a row.
        layout: the mesh and rules of the model; None: a single device.
        recompute_above: lengths above which the keys of a row differ from those of a shorter row, ascending. They are
            the attributes `recompute_above` of the nodes of the model's config, such as `LongRoPE`.
        paging: the pool of pages of the paged caches; None: the model has no paged caches.
        shares_prefixes: whether rows that begin with the same tokens may share pages: all decoding state is in pages,
            and `recompute_above` is empty. A step with page tables may then start after any tokens that are in its
            pages, whichever row computed them. Otherwise it starts after tokens of its slot.
        max_rollback: the largest number of tokens that a step may roll back; None: any number. It is the smallest
            `max_rollback` of the configs of layers with decoding state, and 0 if one of them has no such attribute.
        least_rollback_in: the path of the first layer with that `max_rollback`; empty if it is None.
        unpaged: the paths of layers with decoding state that is not in pages. It is in slots, which engines can save at
            page boundaries, so that such models share prefixes, too (`Engine.Config.prefix_states`).
        bytes_per_token: bytes of one token in the paged caches of all layers, on all devices together; 0 without
            pages.
        has_hidden_states: whether the model has a layer `norm` before its head, as `for_hidden_states` requires.
    """

    fn: Functional
    state_axes: Tree
    batch_size: int
    max_len: int
    layout: Layout | None = None
    recompute_above: tuple[int, ...] = ()
    paging: Paging | None = None
    shares_prefixes: bool = False
    bytes_per_token: int = 0
    max_rollback: int | None = None
    has_hidden_states: bool = True
    least_rollback_in: str = ""
    unpaged: tuple[str, ...] = ()

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
        fuse: bool = True,
        adapters: Adapters | None = None,
        max_rollback: int = 0,
    ) -> tuple[Decoder, Tree, Tree]:
        """Converts a model that was built for training.

        Args:
            model: a model with the call signature of `axcore.nn.CausalLM`.
            cache: fills every empty cache slot.
            batch_size: the number of rows (slots) in the state.
            max_len: the maximum number of tokens in a row, including the prompt.
            layout: the mesh and rules for the state and the parameters; None: a single device.
            unstack: whether to split the arrays of scanned stacks into one array per layer, which copies them once. A
                scanned stack compiles faster but decodes slower, because each token copies every layer's weights.
            fuse: whether a single device computes the products of one input as one product, such as queries, keys and
                values, or gate and up (see `axcore.nn.fused`). This copies their weights once. On several devices they
                stay apart, since each array is divided between the devices.
            adapters: adds room for adapters to the model. Products of layers with adapters stay apart.
            max_rollback: the number of last tokens of a row that a step must be able to replace, such as drafts. Layers
                with a recurrent state keep it for that many tokens. KV caches can replace any number.

        Returns:
            The decoder, the parameters and the initial state.

        Raises:
            ConfigError: `model` was not built from a config or is not calibrated, none of its layers has decoding
                state, its heads are not divisible by their shards, or its paged caches differ in the size of their
                pools.
        """
        if not isinstance(model, Layer):
            raise ConfigError(f"Decoder.of requires a model that was built from a config, got {type(model).__name__}")
        if not isinstance(cache, KVCache.Config):
            raise ConfigError(
                f"cache must be the Config of a KV cache, such as ContiguousCache.Config(), not {cache!r}"
            )
        require_calibrated(model)
        cfg = model.config
        params = functional(model)[1]
        # State other than caches, such as a router's bias. The caches are created below. It is copied, since engines
        # donate their state, and the model may be used otherwise.
        held = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model, nnx.Not((nnx.Param, DecodingState)))))
        if unstack:
            params, held = unstack_arrays(cfg, params), unstack_arrays(cfg, held)
            cfg = unstacked(cfg)
        if adapters is not None:
            cfg = adapters.attach(cfg)
        if fuse and _is_single(layout):
            cfg, params = fused(cfg, params, held)
        cfg = for_decoding(cfg, batch_size=batch_size, max_len=max_len, cache=cache, max_rollback=max_rollback)
        fn, axes, state = empty_state(cfg, type(model).__name__, batch_size, layout)
        state["model"] = merged(state["model"], held)
        params = pruned(fn.axes, params)
        params = in_compute_dtype(fn.bind(params, state["model"]), params)
        if layout is not None:
            params = jax.device_put(params, layout.shardings(params, fn.axes))
            state = jax.device_put(state, state_shardings(layout, state, axes))
        params = column_major(cfg, params)
        return cls._of(fn, axes, cfg, params, state, batch_size, max_len, layout), params, state

    @classmethod
    def abstract(
        cls,
        cfg: Config,
        *,
        cache: KVCache.Config,
        batch_size: int,
        max_len: int,
        layout: Layout | None = None,
        unstack: bool = True,
        fuse: bool = True,
        max_rollback: int = 0,
    ) -> tuple[Decoder, Tree, Tree]:
        """`of` without arrays: the decoder, and the shapes and shardings of the parameters and of the initial state.

        Args:
            cfg: the config of the model. For the other arguments see `of`.
            layout: the layout. Its devices may be devices to compile for only. None: shapes without shardings.

        Raises:
            ConfigError: a dimension or the heads are not divisible by their shards, or the paged caches differ in the
                size of their pools.
        """
        cfg = unstacked(cfg) if unstack else cfg
        if fuse and _is_single(layout):
            _, params, held = abstract(cfg)
            cfg, _ = fused(cfg, params, held)
        cfg = for_decoding(cfg, batch_size=batch_size, max_len=max_len, cache=cache, max_rollback=max_rollback)
        fn, params, held = abstract(cfg)
        params = in_compute_dtype(fn.bind(params, held), params)
        state = {"lengths": jax.ShapeDtypeStruct((batch_size,), jnp.int32), "model": held}
        decoder = cls._of(fn, state_axes(fn), cfg, params, state, batch_size, max_len, layout)
        if layout is None:
            return decoder, params, state

        def placed(arrays: Tree, shardings: Tree) -> Tree:
            return jax.tree.map(
                lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
                arrays,
                shardings,
            )

        params = placed(params, layout.shardings(params, fn.axes))
        state = placed(state, state_shardings(layout, state, decoder.state_axes))
        return decoder, column_major(cfg, params), state

    @classmethod
    def _of(
        cls,
        fn: Functional,
        axes: Tree,
        cfg: Config,
        params: Tree,
        state: Tree,
        batch_size: int,
        max_len: int,
        layout: Layout | None,
    ) -> Decoder:
        """The decoder of a model in the form for decoding. `params` and `state` may be shapes."""
        if layout is not None:
            check_heads(cfg, layout, "model")
        limits = tuple(sorted({each for _, node in walk(cfg) if (each := getattr(node, "recompute_above", None))}))
        paging = paging_of(cfg)
        model = fn.bind(params, state["model"])
        keeping = layers_with_state(model)
        paged = [each for _, states in keeping.values() for each in states if is_paged(each)]
        unpaged = tuple(path for path, (_, states) in keeping.items() if not all(map(is_paged, states)))
        rollback = {path: getattr(layer.config, "max_rollback", 0) for path, (layer, _) in keeping.items()}
        limited = {path: most for path, most in rollback.items() if most is not None}
        least = min(limited, key=limited.__getitem__, default="")
        num_bytes = sum(each.whole.size * each.whole.dtype.itemsize for each in paged)
        return cls(
            fn,
            axes,
            batch_size,
            max_len,
            layout,
            recompute_above=limits,
            paging=paging,
            shares_prefixes=paging is not None and not unpaged and not limits,
            bytes_per_token=0 if paging is None else num_bytes // (paging.num_pages * paging.page_size),
            max_rollback=limited.get(least),
            least_rollback_in=least,
            unpaged=unpaged,
            has_hidden_states=isinstance(getattr(model, "norm", None), Layer),
        )

    @overload
    def __call__(self, params: Tree, state: Tree, step: Step) -> tuple[Float[Array, "batch logits vocab"], Tree]: ...

    @overload
    def __call__(
        self, params: Tree, state: Tree, step: Sequence[Step]
    ) -> tuple[tuple[Float[Array, "batch logits vocab"], ...], Tree]: ...

    def __call__(
        self, params: Tree, state: Tree, step: Step | Sequence[Step]
    ) -> tuple[Float[Array, "batch logits vocab"] | tuple[Float[Array, "batch logits vocab"], ...], Tree]:
        """Runs the model on the tokens of a step, or of several steps together. No slot may have new tokens in two
        steps of one call.

        Returns:
            The float32 logits, for each step if there are several, and the new state. Undefined logits are NaN: at
            padding, at tokens beyond `max_len` or beyond the page table, and in invalid rows. A row is invalid if it
            starts after its cached tokens (see `shares_prefixes`), its length is outside [0, width], its slot is out of
            range or used by several rows (see `Step.slots`), its page table lacks a page for one of its tokens, or its
            length passes one of `recompute_above` in either direction. An invalid row may lose its cached tokens from
            `start` on. To let a row pass a length of `recompute_above`, restart it with all its tokens, as engines do.

        Raises:
            ConfigError: the step has page tables but the model has no paged caches; it has none but the pool is too
                small for a page table of each slot; or, if the values of the tables are known, `Paging.check` fails.
        """
        steps = (step,) if isinstance(step, Step) else tuple(step)
        blocks, held = [], state["lengths"]
        for each in steps:
            block, held = block_of(each, held, self)
            blocks.append(block)
        with self.layout.active() if self.layout is not None else contextlib.nullcontext():
            ids, inputs = model_inputs(blocks)
            (logits, _), model = self.fn(params, state["model"], ids, **inputs)
        found = logits_of_blocks(logits, blocks)
        state = self._placed({"lengths": held, "model": model})
        return found[0] if isinstance(step, Step) else tuple(found), state

    def _placed(self, state: Tree) -> Tree:
        """The new state with the shardings of the old one. Otherwise the compiler may choose others, and the next call
        would compile again and could not use the donated memory."""
        if self.layout is None:
            return state
        placed: Tree = jax.lax.with_sharding_constraint(state, state_shardings(self.layout, state, self.state_axes))
        return placed

    def for_hidden_states(self) -> Decoder:
        """This decoder with hidden states [batch, logits, embed] in place of the logits: the result of the layer `norm`
        of the model, in the dtype of the model. Compiled programs omit the head. Requires `has_hidden_states`."""
        return dataclasses.replace(self, fn=_HiddenStates(**vars(self.fn)))


class _HiddenStates(Functional):
    """A model that returns the result of its layer `norm`, the input of its head."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: as in `Functional`
        (_, collections), state = super().__call__(*args, capture=("norm",), **kwargs)
        return (collections.outputs["norm"], collections), state


def _is_single(layout: Layout | None) -> bool:
    return layout is None or layout.mesh.size == 1
