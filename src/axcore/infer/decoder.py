"""Incremental decoding with KV caches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from axcore.config import Config, ConfigError, walk
from axcore.infer.adapters import Adapters
from axcore.module import DecodingState, Functional, Layer, Rngs, Tree, abstract, functional
from axcore.nn import (
    ADAPTERS,
    CachedBlocks,
    CachedRows,
    KVCache,
    Paging,
    Phase,
    TokenInfo,
    by_columns,
    for_decoding,
    fused,
    unstack_arrays,
    unstacked,
)
from axcore.nn.attention.heads import check_heads
from axcore.numerics import require_calibrated
from axcore.parallel import Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """New tokens for some rows of the decoding state.

    The tokens of a row may be a prompt, a chunk of a prompt, a single token, or several draft tokens to verify. To roll
    back, start the next step at an earlier position: cached tokens from this position on are dropped.

    Attributes:
        ids: the new tokens of each row, padded at the end.
        start: the position of the first new token in its row; 0 restarts the row.
        lengths: the number of new tokens in each row, without padding; None: the width.
        slots: the slot of each row in the state. None: row i uses slot i, and every slot has a row. No slot has two
            rows, unless the decoder `shares_prefixes` and the step has page tables: then consecutive parts of one
            prompt may be rows of one step.
        logits_at: the tokens of each row whose logits are computed, as indices into the width; None: all tokens.
        adapters: the slot of the adapter of each row, -1 for none; None: no row has an adapter (see `Adapters`).
        pages: the pages of each row, in order, for paged caches; `Paging.num_pages` marks an unused entry. None: each
            slot has its own pages, which requires a pool with room for every slot.
        phase: `prefill` or `decode`; None: `decode` if the width is 1, otherwise `prefill`.

    Raises:
        ConfigError: the shapes or dtypes do not match the annotations.
    """

    ids: Int[Array, "batch width"]
    start: Int[Array, " batch"]
    lengths: Int[Array, " batch"] | None = None
    slots: Int[Array, " batch"] | None = None
    logits_at: Int[Array, "batch logits"] | None = None
    pages: Int[Array, "batch pages_per_row"] | None = None
    adapters: Int[Array, " batch"] | None = None
    phase: Phase | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "phase"}
        arrays = {name: array for name, array in given.items() if array is not None}
        if self.phase not in (None, "prefill", "decode"):
            raise ConfigError(f"Step.phase must be 'prefill', 'decode' or None, not {self.phase!r}")
        for name, array in arrays.items():
            if isinstance(array, int | float | list):
                raise ConfigError(f"Step.{name} must be an array, not {array!r}")
        if not all(hasattr(array, "dtype") and hasattr(array, "ndim") for array in arrays.values()):
            return  # JAX unflattens pytrees with leaves other than arrays, such as axes
        batch = self.ids.shape[:1]
        if self.ids.ndim != 2 or 0 in self.ids.shape:
            raise ConfigError(
                f"Step.ids must be [batch, width] with at least one row and one token, got shape {self.ids.shape}"
            )
        for name, array in arrays.items():
            if not jnp.issubdtype(array.dtype, jnp.integer):
                raise ConfigError(f"Step.{name} must have an integer dtype, not {array.dtype}")
            if name in ("start", "lengths", "slots", "adapters") and array.shape != batch:
                raise ConfigError(
                    f"Step.{name} must have shape {batch}, one number for each row; got shape {array.shape}"
                )
            if name in ("logits_at", "pages") and (array.ndim != 2 or array.shape[:1] != batch):
                raise ConfigError(f"Step.{name} must be [batch, ...] with two dimensions, got shape {array.shape}")


class _Block(NamedTuple):
    """A step as the model sees it.

    Attributes:
        tokens: the tokens [batch, width], with their cached rows.
        at: the tokens whose logits are computed.
        defined: which of these logits are defined.
    """

    tokens: TokenInfo
    at: Int[Array, "batch logits"]
    defined: Bool[Array, "batch logits"]


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
        unpaged: the paths of layers with decoding state that is not in pages.
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
        # State other than caches, such as a router's bias. The caches are created below.
        held = nnx.to_pure_dict(nnx.state(model, nnx.Not((nnx.Param, DecodingState))))
        if unstack:
            params, held = unstack_arrays(cfg, params), unstack_arrays(cfg, held)
            cfg = unstacked(cfg)
        if adapters is not None:
            cfg = adapters.attach(cfg)
        if fuse and _is_single(layout):
            cfg, params = fused(cfg, params, held)
        cfg = for_decoding(cfg, batch_size=batch_size, max_len=max_len, cache=cache)
        fn, axes, state = _empty(cfg, type(model).__name__, batch_size, layout)
        state["model"] = _merged(state["model"], held)
        params = _those_of(fn.axes, params)
        if layout is not None:
            params = jax.device_put(params, layout.shardings(params, fn.axes))
            state = jax.device_put(state, state_shardings(layout, state, axes))
        params = by_columns(cfg, params)
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
        cfg = for_decoding(cfg, batch_size=batch_size, max_len=max_len, cache=cache)
        fn, params, held = abstract(cfg)
        state = {"lengths": jax.ShapeDtypeStruct((batch_size,), jnp.int32), "model": held}
        decoder = cls._of(fn, _state_axes(fn), cfg, params, state, batch_size, max_len, layout)
        if layout is None:
            return decoder, params, state

        def placed(arrays: Tree, shardings: Tree) -> Tree:
            return jax.tree.map(
                lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
                arrays,
                shardings,
            )

        placed_params = placed(params, layout.shardings(params, fn.axes))
        return (
            decoder,
            by_columns(cfg, placed_params),
            placed(state, state_shardings(layout, state, decoder.state_axes)),
        )

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
        paging = _paging(cfg)
        model = fn.bind(params, state["model"])
        kept = _layers_with_state(model)
        paged = [each for _, states in kept.values() for each in states if _is_paged(each)]
        unpaged = tuple(path for path, (_, states) in kept.items() if not all(map(_is_paged, states)))
        shares = paging is not None and not unpaged and not limits
        num_bytes = sum(each.whole.size * each.whole.dtype.itemsize for each in paged)
        rollback = {path: getattr(layer.config, "max_rollback", 0) for path, (layer, _) in kept.items()}
        limited = {path: most for path, most in rollback.items() if most is not None}
        least = min(limited, key=limited.__getitem__, default="")
        per_token = 0 if paging is None else num_bytes // (paging.num_pages * paging.page_size)
        has_hidden_states = isinstance(getattr(model, "norm", None), Layer)
        return cls(
            fn,
            axes,
            batch_size,
            max_len,
            layout,
            limits,
            paging,
            shares,
            per_token,
            limited.get(least),
            has_hidden_states,
            least,
            unpaged,
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
            `start` on. To let a row pass a length of `recompute_above`, restart it with all its tokens.

        Raises:
            ConfigError: the step has page tables but the model has no paged caches; it has none but the pool is too
                small for a page table of each slot; or, if the values of the tables are known, `Paging.check` fails.
        """
        steps = (step,) if isinstance(step, Step) else tuple(step)
        blocks, held = [], state["lengths"]
        for each in steps:
            block, held = self._block(each, held)
            blocks.append(block)
        logits, model = self._run(params, state["model"], steps, blocks)
        found = tuple(
            jnp.where(block.defined[..., None], each, jnp.nan) for block, each in zip(blocks, logits, strict=True)
        )
        state = self._placed({"lengths": held, "model": model})
        return found[0] if isinstance(step, Step) else found, state

    def _placed(self, state: Tree) -> Tree:
        """The new state with the shardings of the old one. Otherwise the compiler may choose others, and the next call
        would compile again and could not use the donated memory."""
        if self.layout is None:
            return state
        placed: Tree = jax.lax.with_sharding_constraint(state, state_shardings(self.layout, state, self.state_axes))
        return placed

    def _block(self, step: Step, held: Int[Array, " slots"]) -> tuple[_Block, Int[Array, " slots"]]:
        """The rows of a step, and the length of each slot after it."""
        table = self._page_table(step)
        width, is_shared = step.ids.shape[1], self.shares_prefixes and step.pages is not None
        start = step.start.astype(jnp.int32)
        given = jnp.full(start.shape, width, jnp.int32) if step.lengths is None else step.lengths.astype(jnp.int32)
        counts, slots = jnp.clip(given, 0, width), None
        whole = (start >= 0) & (counts == given)
        if step.slots is not None:
            slots = step.slots.astype(jnp.int32)
            whole &= (slots >= 0) & (slots < self.batch_size)
            if not is_shared:
                whole &= (slots[:, None] == slots).sum(axis=1) == 1
            slots = jnp.where(whole, slots, self.batch_size)  # out of range, so writes are dropped
        before = held if slots is None else held[slots]
        if not is_shared:
            whole &= start <= before
        end, limit = start + counts, self.max_len
        if self.paging is not None and table is not None:
            limit = min(limit, table.shape[1] * self.paging.page_size)
            whole &= self.paging.complete(table, end)
            table = jnp.where(whole[:, None], table, self.paging.num_pages)  # out of range, so writes are dropped
        for bound in self.recompute_above:
            whole &= (start == 0) | ((before > bound) == (end > bound))
        index = start[:, None] + jnp.arange(width, dtype=jnp.int32)
        places = jnp.arange(self.max_len, dtype=jnp.int32)[None]
        rows = CachedRows(
            tokens=TokenInfo(places, places, valid=places < end[:, None], valid_first=True),
            lengths=end,
            slots=slots,
            pages=table,
            phase=step.phase or ("decode" if width == 1 else "prefill"),
        )
        # Padding has the position of the last token, so that it does not lengthen the row for position embeddings.
        positions = jnp.minimum(index, jnp.maximum(end - 1, 0)[:, None])
        valid = None if step.lengths is None else jnp.arange(width) < counts[:, None]
        every = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), step.ids.shape)
        at = every if step.logits_at is None else step.logits_at
        asked = start[:, None] + at
        defined = whole[:, None] & (at >= 0) & (at < counts[:, None]) & (asked >= 0) & (asked < limit)
        # The tokens of an invalid row may have overwritten cached ones.
        end = jnp.where(whole, jnp.minimum(end, limit), jnp.clip(start, 0, before))
        if slots is None:
            held = end
        elif is_shared:  # the last of several rows of a slot counts
            held = held.at[slots].set(0, mode="drop").at[slots].max(end, mode="drop")
        else:
            held = held.at[slots].set(end, mode="drop")
        return _Block(TokenInfo(index, positions, valid=valid, cached=rows), at, defined), held

    def _run(
        self, params: Tree, state: Tree, steps: Sequence[Step], blocks: Sequence[_Block]
    ) -> tuple[tuple[Float[Array, "batch logits vocab"], ...], Tree]:
        """Calls the model. Returns the logits of each block and the new state."""
        with self.layout.active() if self.layout is not None else contextlib.nullcontext():
            tokens, adapters = blocks[0].tokens, _adapters_of_tokens(steps)
            if len(blocks) == 1:
                (logits, _), state = self.fn(
                    params,
                    state,
                    steps[0].ids,
                    positions=tokens.positions,
                    index=tokens.index,
                    valid=tokens.valid,
                    cached=tokens.cached,
                    logits_at=steps[0].logits_at,
                    shared=None if adapters is None else {ADAPTERS: adapters[0]},
                )
                return (logits,), state

            def flat(arrays: Sequence[jax.Array]) -> jax.Array:
                return jnp.concatenate([array.reshape(1, -1) for array in arrays], axis=1)

            starts = np.cumsum([0, *(step.ids.size for step in steps)])
            places = []
            for block, first in zip(blocks, starts[:-1], strict=True):
                rows, width = block.tokens.index.shape
                within = jnp.clip(block.at, 0, width - 1)
                places.append(first + width * jnp.arange(rows, dtype=jnp.int32)[:, None] + within)
            each_of = [block.tokens for block in blocks]
            (logits, _), state = self.fn(
                params,
                state,
                flat([step.ids for step in steps]),
                positions=flat([each.positions for each in each_of]),
                index=flat([each.index for each in each_of]),
                valid=flat(
                    [jnp.full(each.index.shape, True) if each.valid is None else each.valid for each in each_of]
                ),
                cached=CachedBlocks(tuple(each_of)),
                logits_at=flat(places),
                shared=None if adapters is None else {ADAPTERS: flat(adapters)},
            )
        cuts = np.cumsum([block.at.size for block in blocks])[:-1]
        parts = zip(jnp.split(logits[0], cuts), blocks, strict=True)
        return tuple(part.reshape(*block.at.shape, -1) for part, block in parts), state

    def for_hidden_states(self) -> Decoder:
        """This decoder with hidden states [batch, logits, embed] in place of the logits: the result of the layer `norm`
        of the model, in the dtype of the model. Compiled programs omit the head. Requires `has_hidden_states`."""
        fields = {field.name: getattr(self.fn, field.name) for field in dataclasses.fields(self.fn)}
        return dataclasses.replace(self, fn=_HiddenStates(**fields))

    def _page_table(self, step: Step) -> Int[Array, "batch pages_per_row"] | None:
        """The page table of each row; None without paged caches."""
        paging, table = self.paging, step.pages
        if paging is None:
            if table is not None:
                raise ConfigError(
                    "Step.pages is given, but the model has no paged caches; leave it out, or pass a paged cache to "
                    "Decoder.of"
                )
            return None
        if table is None:
            required = self.batch_size * paging.pages_for(self.max_len)
            if paging.num_pages < required:
                raise ConfigError(
                    f"Step.pages is None, which requires {required} pages for {self.batch_size} rows of "
                    f"{self.max_len} tokens, but the pool has num_pages={paging.num_pages}. Pass page tables, or "
                    f"increase num_pages"
                )
            slots = jnp.arange(step.ids.shape[0]) if step.slots is None else step.slots
            return paging.own_pages(slots.astype(jnp.int32), self.max_len)
        lengths = step.ids.shape[1] if step.lengths is None else step.lengths
        if not any(isinstance(each, jax.core.Tracer) for each in (table, step.start, lengths)):
            paging.check(table, step.start, np.broadcast_to(lengths, step.start.shape))
        return table.astype(jnp.int32)


def _layers_with_state(model: nnx.Module) -> dict[str, tuple[Layer, list[DecodingState]]]:
    """The layers of a model that keep decoding state, and that state, by path."""
    found = {}
    for path, each in nnx.iter_modules(model):
        states = [value for value in vars(each).values() if isinstance(value, DecodingState)]
        if states and isinstance(each, Layer):
            found[".".join(map(str, ("model", *path)))] = (each, states)
    return found


def _is_paged(state: DecodingState) -> bool:
    return "page" in state.get_metadata()["axes"]


def _adapters_of_tokens(steps: Sequence[Step]) -> list[Int[Array, "batch width"]] | None:
    """The slot of the adapter of each token of some steps; None: no step has adapters."""
    if all(step.adapters is None for step in steps):
        return None
    of_rows = [jnp.int32(-1) if step.adapters is None else step.adapters.astype(jnp.int32)[:, None] for step in steps]
    return [jnp.broadcast_to(each, step.ids.shape) for each, step in zip(of_rows, steps, strict=True)]


class _HiddenStates(Functional):
    """A model that returns the result of its layer `norm`, the input of its head."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: as in `Functional`
        (_, collections), state = super().__call__(*args, capture=("norm",), **kwargs)
        return (collections.outputs["norm"], collections), state


def _is_single(layout: Layout | None) -> bool:
    return layout is None or layout.mesh.size == 1


def _paging(cfg: Config) -> Paging | None:
    """The pool of pages of the caches in a config for decoding.

    Raises:
        ConfigError: two caches differ.
    """
    found = [(path, node.paging) for path, node in walk(cfg) if isinstance(node, KVCache.Config) and node.paging]
    if not found:
        return None
    first, wanted = found[0]
    for path, paging in found:
        if paging != wanted:
            raise ConfigError(
                f"{path} has {paging}, but {first} has {wanted}. Layers share page tables: set equal values"
            )
    return wanted


def _state_axes(fn: Functional) -> Tree:
    """The logical axes of the state."""
    return {"lengths": ("batch",), "model": fn.state_axes}


def state_shardings(layout: Layout, state: Tree, axes: Tree) -> Tree:
    """The sharding of each array of the decoding state. Rows and kv heads are replicated if their number is not a
    multiple of the number of devices, as in a decoder of one row or with few kv heads.

    Args:
        layout: the mesh and rules.
        state: the arrays or their shapes.
        axes: the logical axes of each array.
    """

    def fitting(array: jax.Array | jax.ShapeDtypeStruct, names: tuple[str | None, ...]) -> tuple[str | None, ...]:
        pairs = zip(names, array.shape, layout.spec(names), strict=True)
        return tuple(
            None if name in ("batch", "kv_head") and size % layout.size_of(at) else name for name, size, at in pairs
        )

    return layout.shardings(state, jax.tree.map(fitting, state, axes))


def _empty(cfg: Config, name: str, batch_size: int, layout: Layout | None) -> tuple[Functional, Tree, Tree]:
    """The decoding model, the logical axes of its state, and the initial state with the shardings of the layout."""
    built: list[Functional] = []

    def empty(key: PRNGKeyArray) -> Tree:  # XLA removes the parameters, since they are not returned
        module = cfg.build(rngs=Rngs(key))
        if not any(isinstance(node, DecodingState) for _, node in nnx.iter_graph(module)):
            raise ConfigError(
                f"no layer of {name} has decoding state: add a KV cache, or a config with a method for_decoding, such "
                f"as Attention.Config"
            )
        fn, _, state = functional(module)
        built.append(fn)
        return {"lengths": jnp.zeros((batch_size,), jnp.int32), "model": state}

    key = jax.random.key(0)
    if layout is None:
        state = jax.jit(empty)(key)
        return built[0], _state_axes(built[0]), state
    shapes = jax.eval_shape(empty, key)
    axes = _state_axes(built[0])
    return built[0], axes, jax.jit(empty, out_shardings=state_shardings(layout, shapes, axes))(key)


def _those_of(wanted: Tree, params: Tree) -> Tree:
    """The parameters that the decoding model has."""
    return {
        name: _those_of(below, params[name]) if isinstance(below, dict) else params[name]
        for name, below in wanted.items()
    }


def _merged(fresh: Tree, held: Tree) -> Tree:
    """The state of the decoding model, with the values of the trained model at paths that both have."""
    merged: Tree = {}
    for name, value in fresh.items():
        if isinstance(value, dict):
            merged[name] = _merged(value, held.get(name, {}))
        else:
            merged[name] = held.get(name, value)
    return merged
