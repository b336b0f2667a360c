"""LoRA adapters per request, for `axcore.infer.Engine`."""

from __future__ import annotations

import hashlib
import pathlib
from typing import Any

import jax
import numpy as np
from flax import nnx

import axcore as ax
from axcore.config import AxcoreError, ConfigError, matches, walk
from axcore.infer import Adapters
from axcore.module import Tree, abstract
from axcore.nn import ContiguousCache, Linear, for_decoding, unstack_arrays
from axcore_lora.adapter import Adapter
from axcore_lora.adapter_params import SLOT, dotted
from axcore_lora.layer import DoRA, scale
from axcore_lora.merging import adapters_of
from axcore_lora.slots import LoRASlots

Path = tuple[Any, ...]


class LoRAAdapters(Adapters):
    """LoRA adapters, one for each request. `Engine.load_adapter` takes a folder (see `Adapter.read`) or an `Adapter`.

    An adapter of a smaller rank is padded with zeros. What it changes in layers that only training has, such as modules
    for multi-token prediction, has no effect. Experts and DoRA are not supported: merge such adapters.
    """

    class Config(Adapters.Config):
        max_rank: ax.PositiveInt = 16
        """The largest rank of an adapter. All slots have room for it."""
        where: tuple[str, ...] = ("**",)
        """Path patterns, in the config of the model, of the linear layers that adapters can change. The layers of
        experts are skipped."""
        exclude: tuple[str, ...] = ()
        """Path patterns of linear layers to leave out."""

    config: Config

    def attach[C: ax.Config](self, cfg: C) -> C:
        own = self.config
        chosen = {
            path: node
            for path, node in walk(cfg)
            if type(node) is Linear.Config
            and any(matches(pattern, path) for pattern in own.where)
            and not any(matches(pattern, path) for pattern in own.exclude)
        }
        if filled := [path for path, node in chosen.items() if node.adapter is not None]:
            raise ConfigError(
                f"model.{filled[0]} already has an adapter. Serve the base model, merge the adapter (axcore merge), or "
                f"exclude the layer with engine.adapters.exclude"
            )

        def filled_with(paths: set[str]) -> C:
            return ax.select(cfg, lambda path, _: path in paths).map(
                lambda path, node: node.set(
                    adapter=LoRASlots.Config(slots=own.max_adapters, rank=own.max_rank, tags=(path,))
                )
            )

        # Whether a config builds a grouped layer is known by its parent only.
        fn, params, state = abstract(filled_with(set(chosen))) if chosen else (None, {}, {})
        modules = [] if fn is None else [each for _, each in nnx.iter_modules(fn.bind(params, state))]
        plain = {
            path
            for each in modules
            if isinstance(each, LoRASlots) and not each.config.groups
            for path in each.config.tags
        }
        if not plain:
            raise ConfigError(
                f"engine.adapters: where={own.where!r} and exclude={own.exclude!r} leave no linear layer of the model. "
                f"Use where=('**',)"
            )
        return filled_with(plain)

    def empty(self, state: Tree) -> Tree:
        return _of_slots(state, {}, ())

    def arrays(self, source: str | pathlib.Path | Adapter, model: ax.Config, state: Tree) -> Tree:
        adapter = source if isinstance(source, Adapter) else None
        if adapter is None:
            if not isinstance(source, str | pathlib.Path):
                raise ConfigError(f"an adapter must be a folder or an axcore_lora.Adapter, not {source!r}")
            adapter = Adapter.read(source, model=model)
        given = _by_path(unstack_arrays(adapter.cfg, _scaled(adapter)))
        found = _of_slots(state, given, ())
        if given:
            path = next(iter(given))
            raise AxcoreError(
                f"the adapter changes {dotted(path)}, for which the engine has no room. Adapt the layer "
                f"(engine.adapters.where and exclude), or merge the adapter (axcore merge) if it is one of experts or "
                f"of another model"
            )
        return found

    def identity(self, arrays: Tree) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for path, each in sorted(_by_path(arrays).items(), key=lambda item: dotted(item[0])):
            used = np.flatnonzero(np.any(each["b"] != 0, axis=-1))
            if used.size:  # the rest of the rank is padding; without any, the adapter does not change the layer
                rank = used[-1] + 1
                digest.update(f"{dotted(path)} {each['a'].dtype} {rank}\n".encode())
                for part in (each["a"][..., :rank], each["b"][..., :rank, :]):
                    digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def write(self, state: Tree, arrays: Tree, slot: jax.Array) -> Tree:
        new = dict(state)
        for name, part in arrays.items():
            if name != SLOT:
                new[name] = self.write(state[name], part, slot)
            else:
                a, b = state[SLOT]["a"], state[SLOT]["b"]
                new[SLOT] = {
                    "a": a.at[..., slot, :].set(part["a"], mode="drop"),
                    "b": b.at[..., slot, :, :].set(part["b"], mode="drop"),
                }
        return new


def _scaled(adapter: Adapter) -> Tree:
    """The parameters of an adapter in the layers that decode, as float32 NumPy arrays, with the scale in b."""
    made: Tree = {}
    decoding = for_decoding(adapter.cfg, batch_size=1, max_len=2, cache=ContiguousCache.Config())
    for path, (cfg, _) in adapters_of(decoding).items():
        if isinstance(cfg, DoRA.Config):
            raise AxcoreError(
                f"{dotted(path)} has a DoRA adapter, which also changes the norms of the weight. Merge it (axcore "
                f"merge), or train with dora=False"
            )
        if cfg.groups is not None:
            raise AxcoreError(
                f"{dotted(path)} has adapters of experts, which an engine cannot choose for each request. Merge them "
                f"(axcore merge), or train without them (where=)"
            )
        held: Any = adapter.params
        for name in (*path, SLOT):
            held = held[name]
        a, b = (np.asarray(jax.device_get(held[name]), np.float32) for name in ("a", "b"))
        below = made
        for name in path:
            below = below.setdefault(name, {})
        below[SLOT] = {"a": a, "b": b * np.float32(scale(cfg))}
    return made


def _by_path(tree: Tree, path: Path = ()) -> dict[Path, Tree]:
    """The adapters of a tree by the path of their layer."""
    found: dict[Path, Tree] = {}
    for name, part in tree.items():
        found |= {path: part} if name == SLOT else _by_path(part, (*path, name))
    return found


def _of_slots(state: Tree, given: dict[Path, Tree], path: Path) -> Tree:
    """The arrays of one slot, in the nesting of the state: those that are given, which are removed from `given`, or
    zeros.

    Raises:
        AxcoreError: an array does not fit.
    """
    made: Tree = {}
    for name, part in state.items():
        if not isinstance(part, dict):
            continue
        if name == SLOT and part.keys() == {"a", "b"}:
            made[SLOT] = _padded(part, given.pop(path, None), path)
        elif below := _of_slots(part, given, (*path, name)):
            made[name] = below
    return made


def _padded(slots: Tree, given: Tree | None, path: Path) -> Tree:
    """The arrays of one slot of a layer: `a` [input, max_rank] and `b` [max_rank, output], padded with zeros.

    Args:
        slots: shapes of the arrays of all slots.
        given: the arrays of an adapter; None: zeros.

    Raises:
        AxcoreError: the rank is too large, a shape differs, or a value is not finite in the dtype of the slots.
    """
    a, b = slots["a"], slots["b"]
    made = {
        "a": np.zeros((*a.shape[:-2], a.shape[-1]), a.dtype),
        "b": np.zeros((*b.shape[:-3], *b.shape[-2:]), b.dtype),
    }
    if given is None:
        return made
    rank, most = given["a"].shape[-1], a.shape[-1]
    if rank > most:
        raise ConfigError(
            f"the adapter of {dotted(path)} has rank {rank}, but engine.adapters.max_rank={most}. Set max_rank to at "
            f"least {rank}"
        )
    expected = {"a": (*made["a"].shape[:-1], rank), "b": (*made["b"].shape[:-2], rank, made["b"].shape[-1])}
    for name, values in made.items():
        new = given[name]
        if new.shape != expected[name]:
            raise AxcoreError(
                f"the adapter of {dotted(path)} has {name} of shape {list(new.shape)}, but the model expects "
                f"{list(expected[name])}. Load an adapter of this model"
            )
        place = values[..., :rank] if name == "a" else values[..., :rank, :]
        place[...] = new
        if not np.isfinite(values.astype(np.float32)).all():
            raise AxcoreError(
                f"the adapter of {dotted(path)} has values that are not finite in {values.dtype}, which would spoil "
                f"the rows of other requests. Check the training run"
            )
    return made
