"""Restores the newest checkpoint of a run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict, cast

import jax

from axcore.train.checkpoint.manager import Checkpointer
from axcore.train.checkpoint.state_layout import named_leaves
from axcore.train.data import Input, check_identity
from axcore.train.files import Json
from axcore.train.step.program import Program, TrainState


class Evaluated(TypedDict, total=False):
    """The last evaluation. Empty before the first one."""

    step: int
    metrics: dict[str, float]


class Meta(TypedDict):
    """The metadata of a run's checkpoint.

    Attributes:
        seconds: training time so far, in all attempts.
        evaluation_due: whether a signal prevented the evaluation of this step. If so, the resumed run starts with it.
        config: the text of the config.
        plugins: the active plugins and their versions.
        input: the identity of the data; see `Input.identity`.
        callbacks: the state of each callback.
    """

    seconds: float
    evaluated: Evaluated
    evaluation_due: NotRequired[bool]
    config: str
    plugins: dict[str, str]
    input: dict[str, Json]
    callbacks: dict[str, Mapping[str, Json]]


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The point from which a run continues: state, number of steps done and position in the data."""

    state: TrainState
    step: int
    data: dict[str, Json]
    meta: Meta


def restore(checkpointer: Checkpointer, program: Program, source: Input) -> Resumed:
    """Restores the newest checkpoint onto the mesh of `program`, whatever mesh and number of processes wrote it.

    Callbacks without arrays in the checkpoint start from the restored parameters. Arrays of callbacks that are no
    longer configured are not read. A message on stderr reports both.

    Raises:
        AxcoreError: the checkpoint is damaged, does not fit the state, or was trained on different data.
    """
    meta = cast(Meta, checkpointer.meta())
    check_identity(meta["input"], source.identity())
    held = checkpointer.layout()
    fits = {name for name, tree in program.state.callbacks.items() if _fits(held, name, tree)}
    unread = {path.split(".")[1] for path in held if path.startswith("callbacks.")} - fits
    wanted = dataclasses.replace(
        program.state, callbacks={name: tree for name, tree in program.state.callbacks.items() if name in fits}
    )
    found = checkpointer.restore(wanted, subset=bool(unread))
    state: TrainState = found.state
    for name in sorted(unread):
        _say(f"callbacks.{name}: the arrays in the checkpoint do not fit this run and are ignored")
    if missing := program.state.callbacks.keys() - fits:
        for name in sorted(missing):
            _say(f"callbacks.{name}: starts from the restored parameters")
        made = program.start_callbacks(state.params)
        state = dataclasses.replace(state, callbacks=state.callbacks | {name: made[name] for name in missing})
    return Resumed(state, found.step, cast("dict[str, Json]", found.data), meta)


def _fits(held: Mapping[str, tuple[str, Sequence[int]]], name: str, tree: object) -> bool:
    leaves = named_leaves({"callbacks": {name: tree}})
    wanted = {path: (str(leaf.dtype), tuple(leaf.shape)) for path, leaf in leaves.items()}
    return wanted == {
        path: (dtype, tuple(shape)) for path, (dtype, shape) in held.items() if path.startswith(f"callbacks.{name}.")
    }


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, file=sys.stderr)
