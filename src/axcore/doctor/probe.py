"""Observes what plugins do at import: `python -m axcore.doctor.probe REPORT STAGE ID=MODULE...`.

Runs in a process of its own, which a plugin may end, block or fork. STAGE is `hooks`, which imports the module of each
plugin and calls its hooks, or `targets`, which imports the targets of its offers and calls its checks. Plugins
are observed one after another. Each observation is appended to REPORT as a line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from axcore.doctor.patches import Patches
from axcore.plugin.attribution import described
from axcore.plugin.loading import load
from axcore.plugin.offers import Check
from axcore.plugin.registry import installed_points, resolve
from axcore.plugin.states import Plugin, PluginError

HEAVY = 50
"""A package is heavy if importing it loads at least this many modules."""
SETTINGS = ("AXCORE_", "JAX_", "LIBTPU_", "NCCL_", "XLA_")
"""The environment variables that must not change begin with these."""
WAIT_S = 0.5
"""How long new threads and forked processes are observed after an import."""


@dataclasses.dataclass
class Observation:
    """What one plugin did.

    Attributes:
        state: the state of the plugin; empty if it ended the process or did not finish.
        detail: see `Plugin`; for a forked process, the error that it continued with.
        offers: the hook and the fields of each offer.
        seconds: the time of the imports.
        heavy: the top-level packages that were imported for it, with their number of modules.
        backends: whether it started the backends of jax.
        patches: the functions and classes of axcore, flax and jax that it changed, each with the place of the new code.
        settings: the environment variables (see `SETTINGS`) and options of jax that it changed.
        forks: the number of forks.
        returned: whether a forked process left the code of the plugin.
        threads: the errors of its threads.
        errors: the targets that cannot be imported, with the reasons, and what the checks of the plugin return.
        output: where its output begins and ends in the output of the process, in bytes.
    """

    id: str
    state: str = ""
    detail: str = ""
    api: int | None = None
    offers: list[tuple[str, dict[str, str]]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    heavy: dict[str, int] = dataclasses.field(default_factory=dict)
    backends: bool = False
    patches: list[str] = dataclasses.field(default_factory=list)
    settings: list[str] = dataclasses.field(default_factory=list)
    forks: int = 0
    returned: bool = False
    threads: list[str] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    output: tuple[int, int] = (0, 0)


class _Probe:
    """Observes the plugins of one process."""

    def __init__(self, report: pathlib.Path):
        self.report = report
        self.patches = Patches()
        self.forks = 0
        self.raised: list[str] = []
        os.register_at_fork(after_in_parent=self._forked)
        threading.excepthook = self._raised

    def observe(self, plugin: Plugin, stage: str) -> None:
        seen, process = Observation(plugin.id), os.getpid()
        if stage == "targets":
            load(plugin)  # observed in the stage `hooks`
            if os.getpid() != process:
                os._exit(0)
            self.patches.found()  # forgets the changes that the module made
            self.patches.options()
        modules, environment, threads = set(sys.modules), dict(os.environ), set(threading.enumerate())
        started, begin, forks, raised = _backends_started(), _written(), self.forks, len(self.raised)
        start = time.perf_counter()
        if stage == "hooks":
            load(plugin)
        else:
            seen.errors = [*_errors(plugin)]
        seen.seconds = time.perf_counter() - start
        if os.getpid() != process:
            self._append(Observation(plugin.id, returned=True, detail=plugin.detail))
            os._exit(0)
        self._wait(threads)
        new = Counter(name.partition(".")[0] for name in set(sys.modules) - modules)
        own = {"axcore", plugin.module.partition(".")[0], *sys.stdlib_module_names}
        seen.heavy = {name: count for name, count in new.most_common() if count >= HEAVY and name not in own}
        seen.state, seen.detail, seen.api = str(plugin.state), plugin.detail, plugin.api
        seen.offers = [(offer.hook, dict(vars(offer))) for offer in plugin.offers]
        seen.backends = _backends_started() and not started
        seen.patches = self.patches.found()
        changed = dict(environment.items() ^ os.environ.items())
        seen.settings = sorted(name for name in changed if name.startswith(SETTINGS)) + self.patches.options()
        seen.forks, seen.threads = self.forks - forks, self.raised[raised:]
        seen.output = (begin, _written())
        self._append(seen)

    def _forked(self) -> None:
        self.forks += 1

    def _raised(self, failure: Any) -> None:  # Any: the type of threading.ExceptHookArgs is private
        name = failure.thread.name if failure.thread is not None else "a thread"
        self.raised.append(f"{name}: {described(failure.exc_value)}")

    def _wait(self, before: set[threading.Thread]) -> None:
        """Waits for new threads and forked processes."""
        deadline = time.monotonic() + WAIT_S
        for thread in set(threading.enumerate()) - before:
            thread.join(max(0.0, deadline - time.monotonic()))
        while self.forks and time.monotonic() < deadline:
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            time.sleep(0.01)

    def _append(self, seen: Observation) -> None:
        with self.report.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(seen)) + "\n")


def _errors(plugin: Plugin) -> Iterator[str]:
    for offer in plugin.offers:
        try:
            target = resolve(plugin, offer)
        except PluginError as error:
            yield str(error)
            continue
        if isinstance(offer, Check):
            try:
                yield from (f"{plugin.id} ({plugin}): {problem}" for problem in target())
            except Exception as error:
                yield f"the check {offer.name!r} of {plugin} failed: {described(error)}"


def _backends_started() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")  # jax has no public function for it
    return bridge is not None and bridge.backends_are_initialized()


def _written() -> int:
    """The size of the output so far."""
    sys.stdout.flush()
    sys.stderr.flush()
    return os.lseek(1, 0, os.SEEK_CUR)


def main() -> None:
    report, stage, *wanted = sys.argv[1:]
    points = {f"{point.name}={point.value}": point for point in installed_points()}
    probe = _Probe(pathlib.Path(report))
    for point in wanted:
        probe.observe(Plugin(points[point]), stage)
    os._exit(0)  # without waiting for threads of plugins


if __name__ == "__main__":
    main()
