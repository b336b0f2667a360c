"""Initial weights of a run."""

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
    """Base class of sources of initial weights, for the slot `initial` of a trainer. A subclass defines `load`:

    ```python
    class Npz(Initial):
        class Config(Initial.Config):
            file: str

        def load(self, model, params, state):
            stored = np.load(self.config.file)
            found = params.keys() & stored.keys()
            return {path: jax.device_put(stored[path], params[path].sharding) for path in found}
    ```

    The trainer raises before it writes anything if the arrays do not fit. It initializes the parameters that match
    `allow_new`. A resumed run starts from its own checkpoints instead.
    """

    class Config(config.Config):
        allow_new: tuple[str, ...] = ()
        """Globs of parameters that may be missing, such as `**.adapter.**`. The model's initializers create them."""

    def __init__(self, cfg: Config):
        self.config = cfg

    def load(self, model: Model, params: Forms, state: Forms) -> dict[str, jax.Array]:
        """Loads arrays by path.

        Args:
            model: the config of the model to load for.
            params: shape, dtype and sharding of each parameter by path, such as `decoder.layers.ffn.up.weight`.
            state: the same for the model's other Variables. Variables that are not returned keep their initial values.

        Returns:
            Arrays by path, for any subset of `params` and `state`, in these shapes, dtypes and shardings. The run takes
            ownership: its first step overwrites them.

        Raises:
            AxcoreError: the stored arrays do not fit.
        """
        raise NotImplementedError


class FromRun(Initial):
    """The parameters of another run or of a folder from `axcore convert`, whose layers may be stacked differently.

    Its other Variables are loaded, too, except for a `GradientState` of another shape, which starts anew.
    """

    class Config(Initial.Config):
        folder: str = REQUIRED
        step: config.NonNegativeInt | None = None
        """Step of the checkpoint to read. None reads the newest."""
        drop: tuple[str, ...] = ()
        """Globs of stored parameters to ignore, named by layer: `decoder.0.attention.output.**`."""

    config: Config

    def load(self, model: Model, params: Forms, state: Forms) -> dict[str, jax.Array]:
        cfg = self.config
        found = ModelFolder.open(cfg.folder)
        arrays, _, extra = found.load(model, params, state, step=cfg.step)
        if extra := [name for name in extra if not any(matches(glob, name) for glob in cfg.drop)]:
            raise AxcoreError(
                f"the model in {found.folder} has parameters that this model lacks. To ignore them, add them to "
                f"initial.drop:{listed(sorted(extra))}"
            )
        return arrays


def use_run_weights[C: config.Config](
    cfg: C, folder: str, step: int | None = None, allow_new: tuple[str, ...] = (), drop: tuple[str, ...] = ()
) -> C:
    """Starts from the parameters of another run or of a model folder.

    Args:
        folder, step, allow_new, drop: see `FromRun`.
    """
    return cfg.set(initial=FromRun.Config(folder=folder, step=step, allow_new=allow_new, drop=drop))


def initial_arrays(
    initial: Initial.Config, model: Model, params: Forms, state: Forms, seed: Seed
) -> dict[str, jax.Array]:
    """All arrays of a model by path, loaded from `initial` or newly initialized.

    Args:
        params, state: shape, dtype and sharding of the parameters and of the other Variables, by path.
        seed: seed of the newly initialized arrays.

    Raises:
        AxcoreError: a parameter is missing, unknown or not finite, or has another shape or dtype.
    """
    forms, kind = {**state, **params}, type(initial).target.__name__
    with config.under("initial"):
        loaded = initial.build().load(model, params, state)
    wrong = [f"{path}: not a parameter of this model" for path in loaded if path not in forms]
    wrong += [
        f"{path}: {tuple(leaf.shape)} {leaf.dtype}, expected {tuple(forms[path].shape)} {forms[path].dtype}"
        for path, leaf in loaded.items()
        if path in forms and (leaf.shape, leaf.dtype) != (forms[path].shape, forms[path].dtype)
    ]
    absent = [
        path for path in params if path not in loaded and not any(matches(glob, path) for glob in initial.allow_new)
    ]
    wrong += [f"{path}: missing" for path in absent]
    if wrong:
        hint = f"\nTo initialize what is missing, add to initial.allow_new: {_pattern(absent[0])}" if absent else ""
        raise AxcoreError(f"initial ({kind}) does not fit the model:{listed(wrong)}{hint}")
    assert_finite(loaded, f"initial ({kind})")
    missing = {path: form for path, form in forms.items() if path not in loaded}
    return {**_fresh(model, missing, seed), **loaded}


def _pattern(path: str) -> str:
    """A pattern of a parameter and its siblings in all layers, such as `**.adapter.**`."""
    *_, parent, _ = ["", *path.split(".")]
    return f"**.{parent}.**" if parent else path


def _fresh(model: Model, forms: Forms, seed: Seed) -> dict[str, jax.Array]:
    """Initializes the arrays at these paths and nothing else."""
    if not forms:
        return {}

    def chosen(seed: jax.Array) -> dict[str, jax.Array]:
        made = {path: leaf for tree in initializer(model)(jax.random.key(seed)) for path, leaf in flat(tree).items()}
        return {path: made[path] for path in forms}

    shardings = {path: form.sharding for path, form in forms.items()}
    return jax.jit(chosen, out_shardings=None if None in shardings.values() else shardings)(seed)


def begin(initial: Initial.Config, model: Model, program: Program, seed: Seed) -> TrainState:
    """The first state of a run that starts from `initial`. Raises like `initial_arrays`."""
    trees = program.state.params, program.state.model_state
    arrays, seen = initial_arrays(initial, model, flat(trees[0]), flat(trees[1]), seed), set[int]()
    for path, leaf in arrays.items():
        if id(leaf) in seen:  # tied weights share one stored array, which a step cannot donate twice
            arrays[path] = jnp.copy(leaf)
        seen.add(id(leaf))
    return program.start(like(trees[0], arrays), like(trees[1], arrays), np.asarray(seed, np.uint32))
