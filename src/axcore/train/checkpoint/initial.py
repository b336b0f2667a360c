"""Weights to start a run from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from axcore import config
from axcore.config import REQUIRED, AxcoreError
from axcore.config.tree import matches
from axcore.module import initializer
from axcore.train.checkpoint.model_folder import Forms, ModelFolder, assert_finite, flat, like
from axcore.train.checkpoint.state_layout import listed
from axcore.train.step.program import Program, TrainState

Model = config.Config
"""The config of a model."""
Seed = int | jax.Array | np.ndarray


class Initial(config.Configurable):
    """Base of weights to start from, for the slot `initial` of a trainer. This is the whole contract:

    ```python
    class Npz(Initial):
        class Config(Initial.Config):
            file: str

        def load(self, model, params, state):
            stored = np.load(self.config.file)
            found = params.keys() & stored.keys()
            return {path: jax.device_put(stored[path], params[path].sharding) for path in found}
    ```

    The trainer does the rest: it refuses what does not fit before anything is written, and draws what `allow_new` names
    afresh. A run that is resumed goes on from its own checkpoints.
    """

    class Config(config.Config):
        allow_new: tuple[str, ...] = ()
        """Globs of parameters that may be missing and then start afresh, such as `**.adapter.**`."""

    def __init__(self, cfg: Config):
        self.config = cfg

    def load(self, model: Model, params: Forms, state: Forms) -> dict[str, jax.Array]:
        """The arrays that there are.

        Args:
            model: what they are for.
            params: path -> shape, dtype and sharding of each parameter, as in `decoder.layers.ffn.up.weight`.
            state: the same of its other Variables; those that are left out start as the model makes them.

        Returns:
            Path -> array, of some of these, in their shapes, dtypes and shardings. They are the run's from now on: its
            first step overwrites them.

        Raises:
            AxcoreError: what there is does not fit.
        """
        raise NotImplementedError


class FromRun(Initial):
    """The parameters of another run, or of what `axcore convert` wrote; its layers may be stacked otherwise."""

    class Config(Initial.Config):
        folder: str = REQUIRED
        step: int | None = None
        """Of which checkpoint; None: the newest."""
        drop: tuple[str, ...] = ()
        """Globs of parameters there that are not used here, by layer: `decoder.0.attention.output.**`."""

    config: Config

    def load(self, model: Model, params: Forms, state: Forms) -> dict[str, jax.Array]:
        cfg = self.config
        found = ModelFolder.open(cfg.folder)
        arrays, _, extra = found.load(model, params, state, step=cfg.step)
        if extra := [name for name in extra if not any(matches(glob, name) for glob in cfg.drop)]:
            raise AxcoreError(
                f"the model in {found.folder} has parameters that this one has no place for; name those that may be "
                f"lost in drop=:{listed(sorted(extra))}"
            )
        return arrays


def use_run_weights[C: config.Config](
    cfg: C, folder: str, step: int | None = None, allow_new: tuple[str, ...] = (), drop: tuple[str, ...] = ()
) -> C:
    """Starts from the parameters of another run, or of a model folder.

    Args:
        folder, step, allow_new, drop: see `FromRun`.
    """
    return cfg.set(initial=FromRun.Config(folder=folder, step=step, allow_new=allow_new, drop=drop))


def gathered(initial: Initial.Config, model: Model, params: Forms, state: Forms, seed: Seed) -> dict[str, jax.Array]:
    """All arrays of a model that starts from given weights, by path.

    Args:
        params, state: path -> shape, dtype and sharding of its parameters and of its other Variables.
        seed: of what starts afresh.

    Raises:
        AxcoreError: parameters that are missing, unknown, misshaped or not finite.
    """
    forms, kind = {**state, **params}, type(initial).target.__name__
    with config.under("initial"):
        loaded = initial.build().load(model, params, state)
    wrong = [f"{path}: no parameter of this model" for path in loaded if path not in forms]
    wrong += [
        f"{path}: {tuple(leaf.shape)} {leaf.dtype}, expected {tuple(forms[path].shape)} {forms[path].dtype}"
        for path, leaf in loaded.items()
        if path in forms and (leaf.shape, leaf.dtype) != (forms[path].shape, forms[path].dtype)
    ]
    wrong += [
        f"{path}: missing; to start it afresh, name it in initial.allow_new"
        for path in params
        if path not in loaded and not any(matches(glob, path) for glob in initial.allow_new)
    ]
    if wrong:
        raise AxcoreError(f"initial ({kind}) does not fit the model:{listed(wrong)}")
    assert_finite(loaded, f"initial ({kind})")
    missing = {path: form for path, form in forms.items() if path not in loaded}
    return {**_fresh(model, missing, seed), **loaded}


def _fresh(model: Model, forms: Forms, seed: Seed) -> dict[str, jax.Array]:
    """What the model's initializers make of these paths; nothing else is computed."""
    if not forms:
        return {}

    def chosen(seed: jax.Array) -> dict[str, jax.Array]:
        made = {path: leaf for tree in initializer(model)(jax.random.key(seed)) for path, leaf in flat(tree).items()}
        return {path: made[path] for path in forms}

    shardings = {path: form.sharding for path, form in forms.items()}
    return jax.jit(chosen, out_shardings=None if None in shardings.values() else shardings)(seed)


def begin(initial: Initial.Config, model: Model, program: Program, seed: Seed) -> TrainState:
    """The first state of a run that starts from given weights. Raises what `gathered` does."""
    trees = program.state.params, program.state.model_state
    arrays, seen = gathered(initial, model, flat(trees[0]), flat(trees[1]), seed), set[int]()
    for path, leaf in arrays.items():
        if id(leaf) in seen:  # tied weights that are stored once; a step cannot overwrite one array twice
            arrays[path] = jnp.copy(leaf)
        seen.add(id(leaf))
    return program.start(like(trees[0], arrays), like(trees[1], arrays), np.asarray(seed, np.uint32))
