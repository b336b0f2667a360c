"""A list of the distributions whose plugins may be imported, for sites that review each one first.

```toml
[[distribution]]
name = "axcore-rope"
version = "0.1.0"
record = "sha256:..."  # of the file RECORD that the installer wrote, which contains the hash of every other file
```

It detects other versions, changed files and modules that come from elsewhere. It does not protect from someone who can
write to the folders that Python imports from: a `.pth` file or a cached `.pyc` runs without being asked for.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution
from pathlib import Path

from axcore.plugin.attribution import described
from axcore.plugin.loading import specs
from axcore.plugin.states import CORE, Plugin, PluginError

VARIABLE = "AXCORE_ALLOWLIST"


@dataclasses.dataclass(frozen=True)
class Allowlist:
    """The content of an allowlist file.

    Attributes:
        entries: normalized name of a distribution -> (version, `sha256:` and the hash of its RECORD).
    """

    file: Path
    entries: dict[str, tuple[str, str]]

    @classmethod
    def read(cls, file: Path) -> Allowlist:
        """
        Raises:
            PluginError: the file cannot be read, or does not have this form.
        """
        try:
            listed = tomllib.loads(file.read_text(encoding="utf-8")).get("distribution", [])
            return cls(file, {_normalized(each["name"]): (each["version"], each["record"]) for each in listed})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PluginError(
                f"{VARIABLE}={file} cannot be read, so no plugin is imported: {described(error)}. It must contain "
                "[[distribution]] tables with name, version and record; axcore plugins --write-allowlist writes one"
            ) from None

    def why_refused(self, plugin: Plugin) -> str:
        """Why a plugin may not be imported; `""` if it may."""
        dist, known = plugin.point.dist, self.entries.get(_normalized(plugin.distribution))
        if dist is None or known is None:
            return f"{plugin.distribution} is not in {self.file}"
        version, record = known
        if plugin.version != version:
            return f"{self.file} allows {plugin.distribution} {version}, and {plugin.version} is installed"
        reason = why_unverified(plugin)
        if not reason and record_hash(dist) != record:
            return f"the RECORD of {plugin} is not the one that {self.file} allows"
        return reason


def write(plugins: Iterable[Plugin], file: Path) -> dict[str, str]:
    """Writes an allowlist of the distributions that are installed now.

    Returns:
        The name of each distribution that cannot be listed, with the reason.

    Raises:
        PluginError: the file cannot be written.
    """
    listed: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for plugin in plugins:
        if plugin.id == CORE:
            continue
        reason = why_unverified(plugin)
        if reason or plugin.point.dist is None:
            left_out[plugin.distribution] = reason
            continue
        values = {"name": plugin.distribution, "version": plugin.version, "record": record_hash(plugin.point.dist)}
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in values.items()]
        listed[plugin.distribution] = "".join(["\n[[distribution]]\n", *lines])
    tables = [table for name, table in sorted(listed.items()) if name not in left_out]
    try:
        file.write_text("".join(["# Distributions whose axcore plugins may be imported.\n", *tables]), encoding="utf-8")
    except OSError as error:
        raise PluginError(f"cannot write {file}: {error}") from None
    return left_out


def why_unverified(plugin: Plugin) -> str:
    """Why the files of a plugin are not those that its installer recorded; `""` if all are."""
    dist = plugin.point.dist
    record = _record(dist) if dist is not None else None
    if dist is None or record is None:
        return f"{plugin} has no RECORD"
    recorded: set[str] = set()
    for path, digest, *_ in csv.reader(record.read_text(encoding="utf-8").splitlines()):
        location = Path(str(dist.locate_file(path)))
        if digest and _hash(location, digest.partition("=")[0]) != digest:
            return f"{path} of {plugin} does not have the hash in its RECORD"
        if not digest and not path.endswith((".pyc", ".dist-info/RECORD")):
            return f"the RECORD of {plugin} has no hash of {path}"
        recorded.add(str(location.resolve()))
    for spec in specs(plugin.module):
        if spec.has_location and spec.origin and str(Path(spec.origin).resolve()) not in recorded:
            return f"{spec.name} would be imported from {spec.origin}, which the RECORD of {plugin} does not list"
    return ""


def record_hash(dist: Distribution) -> str:
    """`sha256:` and the hash of the bytes of a distribution's RECORD."""
    path = _record(dist)
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" if path else ""


def _record(dist: Distribution) -> Path | None:
    names = (file for file in dist.files or () if file.name == "RECORD" and file.parent.name.endswith(".dist-info"))
    return next((Path(str(file.locate())) for file in names), None)


def _hash(file: Path, algorithm: str) -> str:
    """The hash of a file in the form of RECORD; `""` if the file is missing or the algorithm is weak."""
    if algorithm not in ("sha256", "sha384", "sha512") or not file.is_file():
        return ""
    digest = hashlib.new(algorithm, file.read_bytes()).digest()
    return f"{algorithm}={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
