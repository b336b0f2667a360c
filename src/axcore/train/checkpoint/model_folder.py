"""Model folders: the config and the arrays of a model on disk. A run folder is also a model folder."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore.config import AxcoreError, Config, ConfigError, from_json, to_json
from axcore.module import Tree, abstract
from axcore.nn import by_layer
from axcore.plugin import active
from axcore.train.checkpoint.manager import Checkpointer
from axcore.train.checkpoint.saved_code import import_plugins, import_saved
from axcore.train.checkpoint.state_layout import listed
from axcore.train.files import expanded, new_folder, os_reason, write_bytes, write_json

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"

Forms = Mapping[str, jax.ShapeDtypeStruct]
"""Shape, dtype and sharding of arrays, by path."""


def flat(tree: Tree) -> dict[str, Any]:
    """Leaves by path, such as `decoder.layers.attention.query.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def like(tree: Tree, arrays: Mapping[str, Any]) -> Tree:
    """A tree with the structure of `tree` and the given arrays."""
    made: Tree = jax.tree.unflatten(jax.tree.structure(tree), [arrays[path] for path in flat(tree)])
    return made


def write_config(folder: pathlib.Path, cfg: Config, tokenizer: Config | None = None) -> None:
    """Writes the config of a model or a run, and the plugins that it requires."""
    described = {"plugins": active(cfg), "config": json.loads(to_json(cfg))}
    if tokenizer is not None:
        described["plugins"] |= active(tokenizer)
        described["tokenizer"] = json.loads(to_json(tokenizer))
    write_json(folder / CONFIG_FILE, described)


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A model on disk.

    Attributes:
        cfg: the config in the folder: a model's or a trainer's.
        tokenizer: the tokenizer of the training text; None if it was not recorded.
    """

    folder: pathlib.Path
    cfg: Any
    tokenizer: Any

    @classmethod
    def open(cls, folder: str | pathlib.Path) -> ModelFolder:
        """Reads the config of a folder, without its arrays.

        Raises:
            AxcoreError: neither a run nor `axcore convert` wrote the folder, or a plugin that the model requires is
                missing.
        """
        folder = expanded(folder, "folder").absolute()
        try:
            content = json.loads((folder / CONFIG_FILE).read_bytes())
            plugins = dict(content["plugins"])
            described, tokenizer = (json.dumps(content.get(name)) for name in ("config", "tokenizer"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AxcoreError(
                f"{folder} is not a model folder: {CONFIG_FILE}: {os_reason(error)}. Give a run folder or a folder "
                f"from `axcore convert`."
            ) from error
        import_plugins(plugins, folder)
        import_saved(content)
        try:
            cfg = from_json(described)
            of_input = getattr(getattr(cfg, "input", None), "tokenizer", None)
            own: Any = of_input if tokenizer == "null" else from_json(tokenizer)
        except ConfigError as error:
            raise ConfigError(f"{folder / CONFIG_FILE}: {error}") from error
        return cls(folder, cfg, own.inside(folder) if hasattr(own, "inside") else own)

    @property
    def model(self) -> Any:
        """The config of the model."""
        return getattr(self.cfg, "model", self.cfg)

    def load(
        self, model: Config, params: Forms, state: Forms, *, step: int | None = None
    ) -> tuple[dict[str, jax.Array], list[str], list[str]]:
        """Loads arrays for `model`, whose layers may be stacked differently, in its dtypes and shardings.

        A `GradientState` of another shape, such as an amax history of another length, is not loaded: the next steps
        compute it again.

        Args:
            model: the config of the model to load for.
            params, state: the parameters and the other Variables to load.
            step: step of the checkpoint; None for the newest.

        Returns:
            The arrays found, by path; the names (see `by_layer`) of requested parameters that are not stored; and the
            names of stored parameters that were not requested.
        """
        fn, *trees = abstract(self.model)
        own_params, own_state = map(flat, trees)
        names = by_layer(self.model, [*own_params, *own_state])
        wanted = by_layer(model, [*params, *state])
        forms, own = {**state, **params}, {**own_state, **own_params}
        misshaped = {
            name: f"{name}: the model in {self.folder.name} has {held}, expected {asked}"
            for name in wanted.keys() & names.keys()
            if (held := _part(own, names[name])) != (asked := _part(forms, wanted[name]))
        }
        of_steps = {path for path, is_gradient_state in flat(fn.gradient_state).items() if is_gradient_state}
        if wrong := [text for name, text in misshaped.items() if names[name][0] not in of_steps]:
            raise AxcoreError(f"the model in {self.folder} does not fit:{listed(sorted(wrong))}")
        names = {name: place for name, place in names.items() if name not in misshaped}
        missing = [name for name, (path, _) in wanted.items() if path in params and name not in names]
        extra = [name for name, (path, _) in names.items() if path in own_params and name not in wanted]
        whole = {path for path in forms if all(name in names for name, (of, _) in wanted.items() if of == path)}
        stored: dict[str, jax.ShapeDtypeStruct] = {}
        for name, (path, _) in wanted.items():
            if path in whole:
                source, form = names[name][0], forms[path]
                sharding = form.sharding if source == path and form.shape == own[path].shape else None
                stored[source] = jax.ShapeDtypeStruct(own[source].shape, form.dtype, sharding=sharding)
        read = self._read(own_params, own_state, stored, step)
        unchanged = {path for path in whole if path in read and forms[path].shape == own[path].shape}
        parts: dict[str, dict[tuple[int, ...], jax.Array]] = {path: {} for path in whole - unchanged}
        for name, (path, index) in wanted.items():
            if path in parts:
                source, at = names[name]
                parts[path][index] = read[source][at]
        arrays = {path: _joined(each, forms[path]) for path, each in parts.items()}
        return arrays | {path: read[path] for path in unchanged}, missing, extra

    def _read(self, params: Forms, state: Forms, asked: Forms, step: int | None) -> dict[str, jax.Array]:
        trees = {"params": params, "model_state": state}
        abstract_state = {kind: {path: asked[path] for path in tree if path in asked} for kind, tree in trees.items()}
        cfg = getattr(self.cfg, "checkpointer", Checkpointer.Config())
        with cfg.build(self.folder / CHECKPOINTS) as checkpointer:
            restored = checkpointer.restore(abstract_state, step, subset=True, cast=True).state
        return {**restored["model_state"], **restored["params"]}


def _part(forms: Forms, place: tuple[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of one layer's array."""
    path, index = place
    return tuple(forms[path].shape[len(index) :])


def _joined(parts: Mapping[tuple[int, ...], jax.Array], form: jax.ShapeDtypeStruct) -> jax.Array:
    """Assembles an array from its parts, given by index into its leading axes, in the sharding of `form`."""
    array = parts[()] if () in parts else jnp.stack([parts[index] for index in sorted(parts)]).reshape(form.shape)
    return array if form.sharding is None else jax.device_put(array, form.sharding)


def save_model(
    folder: str | pathlib.Path,
    cfg: Config,
    params: Tree,
    state: Tree | None = None,
    *,
    tokenizer: Config | None = None,
    files: Mapping[str, bytes] | None = None,
) -> pathlib.Path:
    """Writes a model folder atomically.

    Args:
        cfg: the config of the model, or of a trainer for it.
        params, state: as returned by `axcore.functional`.
        tokenizer: the tokenizer of the training text. If its config has a method `inside(folder) -> Config`, reading
            the folder calls it with the folder's path. If it refers to files elsewhere, it has a method `packed()`,
            which returns the config and the `files` of a folder that may be moved.
        files: the contents of additional files, by name.

    Raises:
        AxcoreError: the folder exists or cannot be written.
    """
    folder = new_folder(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_config(partial, cfg, tokenizer)
        for name, content in (files or {}).items():
            write_bytes(partial / name, content)
        with Checkpointer.Config(asynchronous=False).build(partial / CHECKPOINTS) as checkpointer:
            held = {"params": flat(params), "model_state": flat(state or {})}
            checkpointer.save(0, held, data=None, meta={"plugins": active(cfg)})
        partial.rename(folder)
    except OSError as error:
        raise AxcoreError(f"cannot write the model folder {folder}: {os_reason(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def assert_finite(arrays: Mapping[str, jax.Array], where: str) -> None:
    """Raises if an array contains NaN or infinities.

    Raises:
        AxcoreError: lists the arrays.
    """
    numbers = {path: leaf for path, leaf in arrays.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    finite = jax.device_get(_finite(numbers))
    if bad := [path for path, ok in finite.items() if not np.all(ok)]:
        raise AxcoreError(f"{where} has values that are not finite:{listed(sorted(bad))}")


@jax.jit
def _finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.isfinite(leaf).all() for path, leaf in arrays.items()}
