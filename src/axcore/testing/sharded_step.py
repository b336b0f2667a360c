"""One AdamW step of whole configs on several CPU devices and on one, in a process of its own.

`python -m axcore.testing.sharded_step` reads a pickled request from stdin and writes the pickled answer to stdout.
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
from typing import Any

from axcore.testing.devices import ask


@dataclasses.dataclass(frozen=True)
class Compared:
    """What a step gave on many devices, beside one.

    Attributes:
        metrics: name -> (on many, on one): the loss, the z-loss, the gradient norm.
        gradients, updates: path -> largest difference, over the largest value on one device; of updates without what
            rounding the new parameter accounts for.
        vanishing: paths of parameters whose gradient is zero on one device, where nothing is compared.
        parts: path -> in how many parts a parameter is held.
        moments: path -> in how many parts its moments are held.
        rows: rows of the batch, and those that one device holds.
        refused: what a mesh of one device less than the config asks for says; empty where it takes them.
    """

    metrics: dict[str, tuple[float, float]]
    gradients: dict[str, float]
    updates: dict[str, float]
    vanishing: list[str]
    parts: dict[str, int]
    moments: dict[str, int]
    rows: tuple[int, int]
    refused: str


def compare(cases: dict[str, tuple[Any, Any, Any, int]]) -> dict[str, Compared]:
    """Runs each case: (config, config as it is laid out, batch of numpy arrays, number of devices)."""
    return {name: Compared(**found) for name, found in ask(__name__, cases).items()}


def _step(cfg: Any, start: Any, batch: Any, count: int) -> Any:
    """(state before, state after, metrics, placed batch); `start` None: the config's own first state."""
    import jax
    import jax.numpy as jnp

    from axcore.testing.models import by_path
    from axcore.train.step.program import program

    made = program(cfg.model, cfg.learner, cfg.mesh.make(jax.devices()[:count]), cfg.objective, cfg.microbatches)
    start = jax.device_get(made.init(jnp.uint32(0))) if start is None else start
    changed = by_path(made.state).keys() ^ by_path(start).keys()
    assert not changed, f"the layout changes what is trained: {sorted(changed)}"
    placed = jax.tree.map(lambda leaf: leaf.sharding, (made.state, made.batch_shapes(batch)))
    state, rows = jax.device_put((start, batch), placed)
    new, metrics = made.compile_train(batch)(state, rows)
    return start, new, metrics, rows


def _compare(plain: Any, laid_out: Any, batch: Any, count: int) -> Compared:
    import jax
    import numpy as np
    import optax

    from axcore.config import ConfigError
    from axcore.testing.models import by_path

    before, one, one_metrics, _ = _step(plain, None, batch, 1)
    _, many, metrics, rows = _step(laid_out, before, batch, count)

    # After one step from zero, AdamW's first moment is `1 - b1` times the gradient: equal as far as gradients are.
    def moments(state: Any) -> tuple[Any, Any]:
        is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)  # noqa: E731
        (adam,) = [node for node in jax.tree.leaves(state.optimizer, is_leaf=is_adam) if is_adam(node)]
        return adam.mu, adam.nu

    def arrays(tree: Any) -> dict[str, Any]:
        return {path: np.asarray(leaf) for path, leaf in by_path(tree).items()}

    def parts(tree: Any) -> dict[str, int]:
        return {path: leaf.size // leaf.addressable_shards[0].data.size for path, leaf in by_path(tree).items()}

    start, (moved, expected) = arrays(before.params), (arrays(many.params), arrays(one.params))
    gradients, exact = arrays(moments(many)[0]), arrays(moments(one)[0])
    alive = [path for path in exact if exact[path].any()]

    def error(found: Any, wanted: Any, rounding: float = 0.0) -> float:
        return float(max(np.abs(found - wanted).max() - rounding, 0.0) / np.abs(wanted).max())

    def update_error(path: str) -> float:
        old = start[path]
        return error(moved[path] - old, expected[path] - old, np.finfo(old.dtype).eps * np.abs(old).max())

    mu, nu = (parts(each) for each in moments(many))
    try:
        laid_out.mesh.make(jax.devices()[: count - 1])
        refused = ""
    except ConfigError as told:
        refused = str(told)
    inputs = rows["inputs"]
    return Compared(
        metrics={name: (float(metrics[name]), float(value)) for name, value in one_metrics.items()},
        gradients={path: error(gradients[path], exact[path]) for path in alive},
        updates={path: update_error(path) for path in alive},
        vanishing=[path for path in exact if path not in alive],
        parts=parts(many.params),
        moments={path: min(mu[path], nu[path]) for path in mu},
        rows=(inputs.shape[0], inputs.addressable_shards[0].data.shape[0]),
        refused=refused,
    )


if __name__ == "__main__":
    request = pickle.load(sys.stdin.buffer)
    answer = {name: dataclasses.asdict(_compare(*case)) for name, case in request.items()}
    sys.stdout.buffer.write(pickle.dumps(answer))
