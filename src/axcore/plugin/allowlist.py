"""Allowlists: files that list the distributions whose plugins may be imported, for sites that review plugins first.

```toml
[[distribution]]
name = "axcore-rope"
version = "0.1.0"
record = "sha256:..."  # hash of RECORD, the file in which the installer lists the hash of every other file
```

An allowlist detects other versions, changed files and modules imported from other places. It does not protect against
an attacker who can write to the folders that Python imports from: a `.pth` file or a cached `.pyc` runs unchecked.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import tomllib
from importlib.metadata import Distribution
from pathlib import Path

from axcore.plugin.attribution import described
from axcore.plugin.loading import specs
from axcore.plugin.states import Plugin, PluginError

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
            PluginError: the file cannot be read, or has another format.
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
            return f"{self.file} allows {plugin.distribution} {version}, but {plugin.version} is installed"
        reason = why_unverified(plugin)
        if not reason and record_hash(dist) != record:
            return f"the RECORD of {plugin} does not have the hash in {self.file}"
        return reason


def why_unverified(plugin: Plugin) -> str:
    """Why the files of a plugin do not match the RECORD of its installer; `""` if they do."""
    dist = plugin.point.dist
    if dist is None or _record(dist) is None:
        return f"{plugin} has no RECORD"
    verified: set[Path] = set()
    for file in dist.files or ():
        location = Path(str(file.locate()))
        if file.hash is not None and file.hash.mode in ("sha256", "sha384", "sha512"):
            digest = hashlib.new(file.hash.mode, location.read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                return f"{file} of {plugin} does not match its hash in RECORD"
            verified.add(location.resolve())
        elif file.suffix != ".pyc" and file.name != "RECORD":
            return f"the RECORD of {plugin} has no SHA-2 hash of {file}"
    for spec in specs(plugin.module):
        if spec.has_location and spec.origin and Path(spec.origin).resolve() not in verified:
            return f"{spec.name} would be imported from {spec.origin}, which the RECORD of {plugin} does not list"
    return ""


def record_hash(dist: Distribution) -> str:
    """`sha256:` and the hash of the bytes of a distribution's RECORD."""
    path = _record(dist)
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" if path else ""


def _record(dist: Distribution) -> Path | None:
    return next((Path(str(file.locate())) for file in dist.files or () if file.name == "RECORD"), None)


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
