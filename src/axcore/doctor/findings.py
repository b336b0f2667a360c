"""The findings of `axcore doctor` about plugins, which it imports only in other processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from axcore.doctor.probe import Observation
from axcore.plugin import MeshRule, Plugin, Registry, State
from axcore.plugin.offers import OFFERS
from axcore.plugin.registry import installed_points

HOOKS_S, TARGETS_S = 30, 120
"""Time limits in seconds: for the import of one plugin, and for the import of the targets of all plugins."""
SLOW_S = 0.5
SHOWN = 100
"""How many characters of the output of a plugin are shown."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: `wrong` makes the exit code 1, `warning` is for the author of a plugin, and `note` may be intended.
        plugin: the id of the plugin, if the finding is about one.
    """

    check: str
    status: Literal["ok", "note", "warning", "wrong"]
    message: str
    plugin: str = ""


def discover() -> tuple[Registry, list[Finding]]:
    """The installed plugins, each loaded in a process of its own, and the findings about them.

    Raises:
        PluginError: an environment variable is invalid.
    """
    found: dict[str, list[Finding]] = {}

    def load(plugins: Iterable[Plugin]) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for (each,) in pool.map(lambda plugin: [*_observed([plugin], "hooks", HOOKS_S)], plugins):
                each.apply()
                found[each.plugin.id] = [*each.findings()]

    # Everything that AXCORE_STRICT would refuse is reported anyway.
    environ = {name: value for name, value in os.environ.items() if (name, value) != ("AXCORE_STRICT", "1")}
    registry = Registry(installed_points(), environ, load)
    for plugin in registry.plugins.values():
        found.setdefault(plugin.id, []).insert(0, _state(plugin))
    return registry, [finding for id in registry.plugins for finding in found[id]]


def targets(registry: Registry, found: Iterable[Finding]) -> Iterator[Finding]:
    """The findings about the targets of all loaded plugins.

    Args:
        found: the other findings. The targets of a plugin with a warning are imported in a process of their own.
    """
    loaded = [plugin for plugin in registry.plugins.values() if plugin.offers]
    alone = {each.plugin for each in found if each.status != "ok"}
    groups = [[plugin for plugin in loaded if plugin.id not in alone]]
    groups += [[plugin] for plugin in loaded if plugin.id in alone]
    for group in groups:
        for each in _observed(group, "targets", TARGETS_S):
            yield from each.findings()


def rules(registry: Registry) -> Iterator[Finding]:
    """The patterns of the mesh rules of each plugin."""
    for plugin in registry.plugins.values():
        if patterns := [offer.pattern for offer in plugin.offers if isinstance(offer, MeshRule)]:
            yield Finding("mesh rules", "ok", f"{plugin.id} ({plugin}) has rules for {', '.join(patterns)}")


@dataclasses.dataclass(frozen=True)
class _Observed:
    """The result of a probe.

    Attributes:
        ended: how the process ended before the observation was complete; empty if it did not.
        printed: the beginning of the output.
        size: the size of the output in bytes.
    """

    plugin: Plugin
    stage: str
    seen: Observation
    ended: str
    returned: str | None
    printed: str
    size: int

    def apply(self) -> None:
        """Sets the state and the offers of the plugin."""
        plugin, seen = self.plugin, self.seen
        plugin.state, plugin.api = State(seen.state or State.FAILED), seen.api
        plugin.detail = f"its import {self.ended}" if self.ended else seen.detail
        plugin.offers = tuple(OFFERS[hook](**fields) for hook, fields in seen.offers)

    def findings(self) -> Iterator[Finding]:
        seen, what = self.seen, "its import" if self.stage == "hooks" else "the import of its targets"

        def finding(status: Literal["warning", "wrong"], message: str) -> Finding:
            return Finding("plugin", status, f"{self.plugin.id} ({self.plugin}): {what} {message}", self.plugin.id)

        if self.stage == "hooks":
            if seen.seconds >= SLOW_S:
                yield finding("warning", f"takes {seen.seconds:.1f} s, in every command. Move slow work to the targets")
            if seen.heavy:
                listed = ", ".join(f"{package} ({count} modules)" for package, count in seen.heavy.items())
                yield finding("warning", f"loads {listed}. Import them in the modules of the targets")
        elif self.ended:
            yield finding("wrong", self.ended)
        for error in seen.errors:
            yield Finding("offers", "wrong", error)
        if seen.backends:
            yield finding(
                "wrong",
                "starts the backends of jax, after which jax.distributed cannot start. Create arrays and look for "
                "devices in functions only",
            )
        for patch in seen.patches:
            yield finding("wrong", f"replaces {patch}, for everyone. Offer a feature or subclass the layer instead")
        for setting in seen.settings:
            yield finding("warning", f"changes {setting} for the whole process. Leave it to the user")
        if self.returned is not None:
            why = self.returned and f" with {self.returned}"
            yield finding("wrong", f"forks, and the new process continues in axcore{why}. Do not fork at import")
        elif seen.forks:
            yield finding("warning", "forks. Start processes in the functions that need them")
        for error in seen.threads:
            yield finding("wrong", f"starts a thread that fails: {error}. Start threads in functions, and catch errors")
        if self.size:
            first = " ".join(self.printed.split())[:SHOWN]
            yield finding("warning", f"prints {self.size:,} bytes: {first!r}. Use the module logging instead")


def _state(plugin: Plugin) -> Finding:
    """Whether a plugin is loaded, and why not."""
    why = f": {plugin.reason}" if plugin.reason else ""
    status: Literal["ok", "note", "wrong"] = "note"
    if plugin.state is State.LOADED:
        status = "ok"
    elif plugin.state in (State.FAILED, State.INCOMPATIBLE):
        status = "wrong"
    return Finding("plugin", status, f"{plugin.id} ({plugin}) is {plugin.state}{why}", plugin.id)


def _observed(plugins: Sequence[Plugin], stage: str, limit_s: float) -> Iterator[_Observed]:
    """Observes plugins in one process, or in another after each plugin that ends the process or does not finish."""
    remaining = list(plugins)
    while remaining:
        with tempfile.TemporaryDirectory() as folder:
            report, output = pathlib.Path(folder, "report"), pathlib.Path(folder, "output")
            report.touch()
            ended = _run(remaining, stage, limit_s, report, output)
            lines = [Observation(**json.loads(line)) for line in report.read_text(encoding="utf-8").splitlines()]
            done = {seen.id: seen for seen in lines if not seen.returned}
            returned = {seen.id: seen.detail.strip().rpartition("\n")[2] for seen in lines if seen.returned}
            with output.open("rb") as file:
                for plugin in remaining[: len(done) + 1]:
                    seen = done.get(plugin.id) or Observation(plugin.id)
                    begin, end = seen.output if plugin.id in done else (0, 0)
                    file.seek(begin)
                    printed = file.read(min(end - begin, 4 * SHOWN)).decode(errors="replace")
                    yield _Observed(
                        plugin,
                        stage,
                        seen,
                        "" if plugin.id in done else ended,
                        returned.get(plugin.id),
                        printed,
                        end - begin,
                    )
        remaining = remaining[len(done) + 1 :]


def _run(plugins: Sequence[Plugin], stage: str, limit_s: float, report: pathlib.Path, output: pathlib.Path) -> str:
    """Runs the probe. Returns how it ended."""
    command = [sys.executable, "-P", "-m", "axcore.doctor.probe", str(report), stage]
    command += [f"{plugin.id}={plugin.module}" for plugin in plugins]
    path = os.pathsep.join(filter(None, sys.path))
    # If code of a plugin asks for the registry, it contains no plugin that is known to be broken.
    environ = {**os.environ, "PYTHONPATH": path, "AXCORE_PLUGINS": ",".join(plugin.id for plugin in plugins)}
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environ, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"does not finish within {limit_s:g} s. A module must define things only"
        finally:
            _end(process)
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"ends the process with {how}. A module must raise an exception instead"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a probe and the processes that plugins started in it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
