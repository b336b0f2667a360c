"""Models with their weights and tokenizers, from folders and recipes."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import jax

from axcore.config import AxcoreError, ConfigError, under
from axcore.infer.disaggregation.handover import Prefill
from axcore.infer.engine import Engine
from axcore.module import DTypes, Layer, Rngs, Tree, abstract, initializer
from axcore.nn import without_caches
from axcore.parallel import Layout
from axcore.plugin import Recipe, registry
from axcore.train.checkpoint.initial import FromRun, initial_arrays
from axcore.train.checkpoint.model_folder import ModelFolder, flat, like
from axcore.train.data.tokenizers import Tokenizer
from axcore.train.run.trainer import Trainer


class LoadedModel(NamedTuple):
    """A model with its weights, and its tokenizer."""

    model: Layer
    tokenizer: Tokenizer


def load_model(
    source: str | pathlib.Path | Trainer.Config,
    *,
    name: str = "",
    dtype: str | None = None,
    keep_caches: bool = True,
    weights: bool = True,
    layout: Layout | None = None,
) -> LoadedModel:
    """Loads a model for inference.

    Args:
        source: a run folder, a folder that `axcore convert` wrote, or the config of a trainer, such as a recipe, whose
            `initial` has weights.
        name: the name of the recipe, for messages.
        dtype: dtype of parameters and activations; None: the model's.
        keep_caches: whether layers keep the KV caches that the config chooses. If not, every cache slot is empty.
        weights: whether `source` must have weights. If not, those of a recipe without are random.
        layout: how the weights are sharded as they are loaded; None: they are on the default device.

    Raises:
        AxcoreError: `source` is not a model folder, has no weights or no tokenizer, or `dtype` is not a float dtype.
    """
    if isinstance(source, Trainer.Config):
        cfg, tokenizer, initial = source.model, getattr(source.input, "tokenizer", None), source.initial
        if initial is None and weights:
            raise AxcoreError(
                f"the recipe {name!r} has no weights. Pass the folder of a trained run (axcore train {name}), or set "
                f"initial"
            )
    else:
        name = str(source)
        if not pathlib.Path(name).exists() and registry().find(Recipe, name) is not None:
            raise AxcoreError(f"{name!r} is a recipe, not a folder. Pass its config: axcore.recipe({name!r})")
        found = ModelFolder.open(source)
        cfg, tokenizer, initial = found.model, found.tokenizer, FromRun.Config(folder=name)
    if tokenizer is None or not hasattr(tokenizer, "build"):
        remedy = "Convert it again with --tokenizer FILE" if pathlib.Path(name).is_dir() else "Set input.tokenizer"
        raise ConfigError(f"{name}: the model has no tokenizer. {remedy}")
    with under("tokenizer"):
        built = tokenizer.build()
    known = getattr(cfg, "vocab_size", built.vocab_size)
    if built.vocab_size > known:
        raise ConfigError(f"{name}: the tokenizer has {built.vocab_size} ids, but model.vocab_size={known}")
    if dtype is not None:
        own = getattr(cfg, "dtypes", None) or DTypes()
        cfg = cfg.set(dtypes=DTypes(param=dtype, compute=dtype).over(own))
    if not keep_caches:
        cfg = without_caches(cfg)
    fn, params, state = abstract(cfg, "model")
    if layout is not None:
        params, state = _sharded(params, layout, fn.axes), _sharded(state, layout, fn.state_axes)
    if initial is None and layout is None:
        return LoadedModel(cfg.build(rngs=Rngs(0)), built)
    if initial is None:
        shardings = jax.tree.map(lambda form: form.sharding, (params, state))
        params, state = jax.jit(initializer(cfg), out_shardings=shardings)(jax.random.key(0))
        return LoadedModel(fn.bind(params, state), built)
    loaded = initial_arrays(initial, cfg, flat(params), flat(state), 0)
    model = fn.bind(like(params, loaded), like(state, loaded))
    return LoadedModel(model, built)


def _sharded(forms: Tree, layout: Layout, axes: Tree) -> Tree:
    """The shapes of some arrays with their shardings."""
    shardings = layout.shardings(forms, axes)
    return jax.tree.map(
        lambda form, sharding: jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=sharding), forms, shardings
    )


def load_engine(
    source: str | pathlib.Path | Trainer.Config,
    cfg: Engine.Config,
    *,
    dtype: str | None = None,
    layout: Layout | None = None,
    prefill: Prefill | None = None,
) -> Engine:
    """An engine with the model and the tokenizer of `source`.

    ```python
    with load_engine("runs/quickstart", Engine.Config(max_len=512)) as engine:
        print(engine.generate([engine.request("Once upon a time")])[0].text)
    ```

    Args:
        source, dtype: see `load_model`.
        cfg: the config of the engine.
        layout: the mesh and rules of weights and caches; None: a single device.
        prefill: the engine that computes the prompts; None: this one.
    """
    model, tokenizer = load_model(source, dtype=dtype, layout=layout)
    built: Engine = cfg.build(model, tokenizer, eos_ids=tokenizer.eos_ids, layout=layout, prefill=prefill)
    return built
