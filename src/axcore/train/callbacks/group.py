"""Calls the callbacks of one run in order and isolates them from each other's errors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping

import jax

from axcore.config import AxcoreError, ConfigError
from axcore.plugin import attributed
from axcore.plugin.registry import described_supplier
from axcore.runtime import signals
from axcore.train.callbacks import returned
from axcore.train.callbacks.base import Callback, CallbackRequest, FinishedRun, RunInfo, StepInfo
from axcore.train.callbacks.snapshot import EvaluationAbandoned, Snapshot
from axcore.train.errors import TrainingError
from axcore.train.files import Json

ENDS_THE_RUN = (TrainingError,)
"""Errors of a callback that end the run at once, whatever its `on_error`."""


class Callbacks:
    """Calls every callback of a run.

    Attributes:
        failure: the error that ends the run: the first of a callback with `on_error="stop"`, joined with later ones.
    """

    def __init__(self, cfgs: Mapping[str, Callback.Config]):
        self._callbacks: dict[str, Callback] = {}
        self._owners = {name: f"callbacks.{name}" + described_supplier(cfg) for name, cfg in cfgs.items()}
        for name, cfg in sorted(cfgs.items(), key=lambda item: (item[1].order, item[0])):
            if jax.process_index() == 0 or not cfg.target.first_process_only:
                with attributed(self._owners[name], EvaluationAbandoned):
                    self._callbacks[name] = cfg.build()
        self._states: dict[str, Mapping[str, Json]] = {}
        self._failures: list[AxcoreError] = []

    @property
    def failure(self) -> AxcoreError | None:
        return self.failure_with(None)

    def failure_with(self, error: AxcoreError | None) -> AxcoreError | None:
        """`failure` joined with a later `error`, such as that of a failed save. None if no callback failed."""
        if not self._failures:
            return None
        first, *more = [*self._failures, *([error] if error is not None and error not in self._failures else [])]
        if not more:
            return first
        joined = AxcoreError("\nAlso: ".join(map(str, [first, *more])))
        joined.exit_code, joined.__cause__ = first.exit_code, first
        return joined

    def on_device(self) -> dict[str, Callback]:
        """The callbacks that keep arrays on the devices."""
        own = Callback.device_init
        return {name: each for name, each in self._callbacks.items() if type(each).device_init is not own}

    def start(self, run: RunInfo) -> list[tuple[str, CallbackRequest]]:
        return self._requests("start", lambda callback: callback.start(run))

    def due(self, step: int) -> list[tuple[str, CallbackRequest]]:
        return self._requests("due", lambda callback: callback.due(step))

    def step(self, info: StepInfo) -> list[tuple[str, CallbackRequest]]:
        return self._requests("step", lambda callback: callback.step(info))

    def evaluate(self, model: Snapshot) -> dict[str, float]:
        """The metrics of all callbacks."""
        found: dict[str, float] = {}

        def add(callback: Callback) -> None:
            metrics = returned.metrics(callback.evaluate(model), "evaluate")
            for name in found.keys() & metrics.keys():
                raise ConfigError(f"the metric {name!r} is already reported by another callback. Rename one of them.")
            found.update(metrics)

        self._each(add, collective=True)
        return found

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> list[tuple[str, CallbackRequest]]:
        return self._requests("evaluation", lambda callback: callback.evaluation(step, metrics))

    def checkpoint(self, step: int) -> None:
        self._each(lambda callback: callback.checkpoint(step))

    def fail(self, error: BaseException) -> None:
        self._each(lambda callback: callback.failure(error))

    def end(self, run: FinishedRun) -> dict[str, Json]:
        """Entries for `summary.json`. Each callback sees the entries of the callbacks before it."""
        summary = dict(run.summary)
        for name in list(self._callbacks):
            if jax.process_count() == 1 and signals.stop_requested() is not None:
                break
            seen = dataclasses.replace(run, summary=dict(summary))
            for _, entries in self._each(functools.partial(_end, run=seen), only=name):
                summary |= entries
        return summary

    def close(self) -> None:
        self._each(lambda callback: callback.close())

    def states(self) -> dict[str, Mapping[str, Json]]:
        """The state of each callback by name, including callbacks that were disabled or removed from the config."""
        return self._states | {name: state for name, state in self._each(_state) if state}

    def set_states(self, states: Mapping[str, Mapping[str, Json]]) -> None:
        """Restores the state of each callback from a checkpoint."""
        self._states = dict(states)
        for name, state in states.items():
            if name in self._callbacks:
                self._each(functools.partial(_set_state, state=state), only=name)
            elif jax.process_index() == 0:
                print(f"callbacks: keeping the saved state of {name!r}, which is not in this config", file=sys.stderr)
        for name, state in self._each(_state):
            if state and name not in states and jax.process_index() == 0:
                print(f"callbacks.{name}: starts without state, since the checkpoint has none", file=sys.stderr)

    def _requests(self, method: str, call: Callable[[Callback], object]) -> list[tuple[str, CallbackRequest]]:
        asked = self._each(lambda callback: returned.request(call(callback), method))
        found = [(name, request) for name, request in asked if request is not None]
        return [
            # Other processes do not build such a callback, so they cannot make the same request.
            (name, dataclasses.replace(each, deterministic=False))
            if self._callbacks[name].first_process_only
            else (name, each)
            for name, each in found
        ]

    def _each[R](
        self, call: Callable[[Callback], R], only: str | None = None, collective: bool = False
    ) -> list[tuple[str, R]]:
        names: Iterable[str] = list(self._callbacks) if only is None else [only]
        found: list[tuple[str, R]] = []
        for name in names:
            try:
                found.append((name, call(self._callbacks[name])))
            except (*ENDS_THE_RUN, EvaluationAbandoned, KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as raised:  # `attributed` around each call would cost 5 us
                error = self._named(name, raised)
                if collective and jax.process_count() > 1:
                    raise error from raised  # others may be in a device computation that this process will not join
                self._failed(name, error)
        return found

    def _named(self, name: str, raised: BaseException) -> AxcoreError:
        """The error, prefixed with the name and the plugin of the callback."""
        try:
            with attributed(self._owners[name]):
                raise raised
        except AxcoreError as error:
            return error

    def _failed(self, name: str, error: AxcoreError) -> None:
        if self._callbacks[name].config.on_error == "disable":
            print(f"{error}\ncallbacks.{name} is disabled for the rest of this run", file=sys.stderr)
            disabled = self._callbacks.pop(name)
            with contextlib.suppress(Exception):
                disabled.close()
        elif str(error) not in map(str, self._failures):
            self._failures.append(error)


def _end(callback: Callback, run: FinishedRun) -> Mapping[str, Json]:
    return returned.entries(callback.end(run), "end", taken=run.summary)


def _state(callback: Callback) -> Mapping[str, Json]:
    return returned.entries(callback.state(), "state")


def _set_state(callback: Callback, state: Mapping[str, Json]) -> None:
    callback.set_state(state)
