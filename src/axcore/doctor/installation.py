"""What `axcore doctor` finds out about an installation. This module imports neither jax nor flax."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from axcore.config import AxcoreError
from axcore.doctor import findings as plugin_findings
from axcore.doctor.findings import Finding
from axcore.plugin import Registry
from axcore.plugin.controls import VARIABLES
from axcore.plugin.host import installed

TIMEOUT_S = 120
"""The time limit of the process that starts the backends, in seconds."""


def examine() -> Iterator[Finding]:
    """All findings about this installation."""
    yield Finding("python", "ok", f"{platform.python_version()} on {sys.platform} {platform.machine()}")
    pair = _jax_and_flax()
    yield pair
    yield from _controls()
    try:
        found, findings = plugin_findings.discover()
    except AxcoreError as error:  # because of an invalid variable
        yield Finding("plugins", "wrong", str(error))
        return
    yield from findings
    yield from (Finding("plugins", "wrong", sentence) for sentence in found.conflicts())
    yield from plugin_findings.rules(found)
    yield from _requirements(found)
    if pair.status == "ok":
        yield from plugin_findings.targets(found, findings)
        yield from _backends()


def _jax_and_flax() -> Finding:
    try:
        importlib.import_module("axcore.preflight")
    except AxcoreError as error:
        return Finding("jax and flax", "wrong", str(error))
    versions = (f"{name} {installed(name)}" for name in ("jax", "jaxlib", "flax"))
    return Finding("jax and flax", "ok", ", ".join(versions))


def _controls() -> Iterator[Finding]:
    for variable in VARIABLES:
        if variable in os.environ:
            value = os.environ[variable]
            if not value and variable == "AXCORE_PLUGINS":
                value = "'', so no plugin is loaded"
            yield Finding("environment", "note", f"{variable}={value}")


def _requirements(found: Registry) -> Iterator[Finding]:
    """Compares the requirements of axcore and of plugins with the installed versions."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        yield Finding("versions", "note", "not checked: the package `packaging` is not installed")
        return
    wrong = False
    for dist in _distributions(found):
        for text in dist.requires or ():
            try:
                needed = Requirement(text)
            except InvalidRequirement:
                yield Finding("versions", "note", f"{dist.name} {dist.version} requires {text!r}, which cannot be read")
                continue
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            version = installed(needed.name)
            if version is None or not needed.specifier.contains(version, prereleases=True):
                has = f"{needed.name} {version}" if version else "none"
                wrong = True
                message = f"{dist.name} {dist.version} requires {needed.name}{needed.specifier}, but {has} is installed"
                yield Finding("versions", "wrong", message)
    if not wrong:
        yield Finding("versions", "ok", "the requirements of axcore and its plugins are installed")


def _distributions(registry: Registry) -> Iterator[Distribution]:
    """The distributions of axcore and of the plugins."""
    found = {plugin.distribution: plugin.point.dist for plugin in registry.plugins.values()}
    if found.get("axcore") is None:
        try:
            found["axcore"] = distribution("axcore")
        except PackageNotFoundError:  # a source tree that is not installed
            found.pop("axcore", None)
    return (dist for dist in found.values() if dist is not None)


def _backends() -> Iterator[Finding]:
    """Starts the backends in a separate process, because it may crash."""
    command = [sys.executable, "-c", "from axcore.doctor.installation import print_findings; print_findings()"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        yield Finding("backend", "wrong", f"jax found no devices within {TIMEOUT_S} s")
        return
    for line in done.stdout.splitlines():  # libraries may print other lines
        if line.startswith(_MARK):
            yield Finding(**json.loads(line.removeprefix(_MARK)))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        yield Finding("backend", "wrong", f"the process that looks for devices exited with {done.returncode}: {last}")


_MARK = "axcore.doctor "


def _check_backends() -> Iterator[Finding]:
    try:
        import jax

        devices = jax.devices()
        kinds = sorted({device.device_kind for device in devices})
        yield Finding("backend", "ok", f"{jax.default_backend()}: {len(devices)} x {', '.join(kinds)}")
        if jax.default_backend() == "cpu" and "JAX_PLATFORMS" not in os.environ and os.path.exists("/dev/nvidiactl"):
            yield Finding(
                "backend", "note", "jax does not see the NVIDIA GPU of this machine: pip install 'jax[cuda13]'"
            )
    except Exception as error:
        yield Finding("backend", "wrong", f"jax finds no devices: {' '.join(str(error).split())}")


def print_findings() -> None:
    """Prints one finding per line, in the process that `_backends` starts."""
    for each in _check_backends():
        print(_MARK + json.dumps(dataclasses.asdict(each)), flush=True)
