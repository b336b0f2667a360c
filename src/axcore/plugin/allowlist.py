"""A list of the distributions whose plugins may be imported, for sites where somebody has to look at each first.

```toml
[[distribution]]
name = "axcore-rope"
version = "0.1.0"
record = "sha256:..."  # of the file RECORD that its installer wrote, which in turn holds the hash of every other file
```

It notices other versions, changed files and modules that come from elsewhere. It cannot protect from somebody who may
write where Python looks for modules: a `.pth` file or a cached `.pyc` runs without being asked for.
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

from axcore.plugin.loading import specs
from axcore.plugin.states import CORE, Plugin, PluginError

VARIABLE = "AXCORE_ALLOWLIST"
FIELDS = ("name", "version", "record")


@dataclasses.dataclass(frozen=True)
class Allowlist:
    """What an allowlist file says.

    Attributes:
        file: where it was read.
        entries: normalized name of a distribution -> (version, `sha256:` and the hash of its RECORD).
    """

    file: Path
    entries: dict[str, tuple[str, str]]

    @classmethod
    def read(cls, file: Path) -> Allowlist:
        """
        Raises:
            PluginError: the file cannot be read, or is not of this form.
        """
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PluginError(f"{VARIABLE}={file} cannot be read, so no plugin is imported: {error}") from None
        entries: dict[str, tuple[str, str]] = {}
        listed = content.pop("distribution", [])
        if content or not isinstance(listed, list):
            raise PluginError(f"{VARIABLE}={file}: it holds [[distribution]] tables and nothing else")
        for number, entry in enumerate(listed, 1):
            if not isinstance(entry, dict) or set(entry) != set(FIELDS) or not all(map(_is_text, entry.values())):
                raise PluginError(f"{VARIABLE}={file}: distribution {number} must have the texts {', '.join(FIELDS)}")
            if not re.fullmatch(r"sha256:[0-9a-f]{64}", entry["record"]):
                raise PluginError(
                    f"{VARIABLE}={file}: record of {entry['name']!r} must be 'sha256:' and 64 hexadecimal digits"
                )
            if _normalized(entry["name"]) in entries:
                raise PluginError(f"{VARIABLE}={file}: it lists {entry['name']!r} twice")
            entries[_normalized(entry["name"])] = entry["version"], entry["record"]
        return cls(file, entries)

    def why_refused(self, plugin: Plugin) -> str:
        """Why a plugin may not be imported; `""` when it may."""
        known = self.entries.get(_normalized(plugin.distribution))
        if plugin.point.dist is None or known is None:
            return f"{plugin.distribution} is not in {self.file}"
        version, record = known
        if plugin.version != version:
            return f"{self.file} allows {plugin.distribution} {version}, and {plugin.version} is installed"
        flaw = flaw_of(plugin)
        if flaw:
            return flaw
        if record_hash(plugin.point.dist) != record:
            return f"the RECORD of {plugin} is another than {self.file} allows"
        return ""


def write(plugins: Iterable[Plugin], file: Path) -> dict[str, str]:
    """Writes an allowlist of what is installed now.

    Returns:
        Of each distribution that could not be listed: its name, and why.

    Raises:
        PluginError: the file cannot be written.
    """
    listed: dict[str, tuple[str, str, str]] = {}
    left_out: dict[str, str] = {}
    for plugin in plugins:
        name, dist = plugin.distribution, plugin.point.dist
        reason = flaw_of(plugin)
        if plugin.id == CORE:
            continue
        if reason or dist is None:
            left_out[name] = reason
        else:
            listed[name] = (name, plugin.version, record_hash(dist))
    lines = ["# Distributions whose axcore plugins may be imported.\n"]
    for name, values in sorted(listed.items()):
        if name not in left_out:
            pairs = zip(FIELDS, map(json.dumps, values), strict=True)
            lines += ["\n[[distribution]]\n", *(f"{field} = {value}\n" for field, value in pairs)]
    try:
        file.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise PluginError(f"cannot write {file}: {error}") from None
    return left_out


def flaw_of(plugin: Plugin) -> str:
    """Why the files of a plugin cannot be vouched for; `""` when each is as its installer recorded it."""
    dist = plugin.point.dist
    if dist is None:
        return f"{plugin.distribution} has no metadata"
    if _is_editable(dist):
        return f"{plugin} is an editable install, whose files may change at any time"
    recorded: set[Path] = set()
    rows = _record(dist)
    if rows is None:
        return f"{plugin} has no RECORD"
    for path, digest in rows:
        location = Path(str(dist.locate_file(path)))
        if not digest:
            if not path.endswith((".pyc", ".dist-info/RECORD", ".dist-info/RECORD.jws", ".dist-info/RECORD.p7s")):
                return f"the RECORD of {plugin} has no hash of {path}"
            continue
        if _hash(location, digest.partition("=")[0]) != digest:
            return f"{path} of {plugin} is not as its RECORD says"
        recorded.add(location.resolve())
    for spec in specs(plugin.module):
        if spec.has_location and spec.origin and Path(spec.origin).resolve() not in recorded:
            return f"{spec.name} would be imported from {spec.origin}, which the RECORD of {plugin} does not list"
    return ""


def record_hash(dist: Distribution) -> str:
    """`sha256:` and the hash of the bytes of a distribution's RECORD."""
    path = _record_path(dist)
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" if path else ""


def _record(dist: Distribution) -> list[tuple[str, str]] | None:
    """(path, hash) of each file in RECORD; None without one. `dist.files` would leave out what is missing."""
    path = _record_path(dist)
    if path is None:
        return None
    with path.open(encoding="utf-8", newline="") as lines:
        return [(row[0], row[1]) for row in csv.reader(lines) if len(row) > 1]


def _record_path(dist: Distribution) -> Path | None:
    names = (file for file in dist.files or () if file.name == "RECORD" and file.parent.name.endswith(".dist-info"))
    return next((Path(str(file.locate())) for file in names), None)


def _hash(file: Path, algorithm: str) -> str:
    """`sha256=` and the hash of a file in the form of RECORD; `""` where there is no such file, or the hash is weak."""
    if algorithm not in ("sha256", "sha384", "sha512"):
        return ""
    try:
        digest = hashlib.new(algorithm, file.read_bytes()).digest()
    except OSError:
        return ""
    return f"{algorithm}={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def _is_editable(dist: Distribution) -> bool:
    try:
        origin = json.loads(dist.read_text("direct_url.json") or "{}")
        return bool(origin.get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return True  # it cannot be read: not to be trusted


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_text(value: object) -> bool:
    return isinstance(value, str)
