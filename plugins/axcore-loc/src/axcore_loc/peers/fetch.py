"""The sources of releases, from published packages or given folders."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from axcore.config import AxcoreError
from axcore_loc.feature import package_sources
from axcore_loc.peers.systems import INSTALLED

PYTHON = "3.12"
"""The Python version for which wheels are downloaded."""


def default_cache() -> Path:
    """The default folder for downloads."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "axcore-loc"


def sources(release: str, cache: Path, given: Mapping[str, Path]) -> dict[str, str]:
    """Path -> source of every Python file of a release, `name==version` or `name@version`.

    Raises:
        AxcoreError: the sources are not available.
    """
    if release in given:
        return folder_sources(given[release])
    if release.endswith("@installed"):
        return {path: source for package in INSTALLED for path, source in package_sources(package).items()}
    if "@" in release:
        raise AxcoreError(f"{release} has no published package. Give its sources: --source {release}=DIR")
    return archive_sources(download(release, cache))


def download(requirement: str, cache: Path) -> Path:
    """The wheel of a requirement `name==version`, or its source distribution if there is no wheel.

    It is downloaded with pip, without dependencies, and cached. pip runs the build backend of a source distribution to
    read its metadata.

    Raises:
        AxcoreError: pip failed. The message contains its output.
    """
    folder = cache / requirement.replace("==", "-")
    if kept := _archives(folder):
        return kept[0]
    folder.mkdir(parents=True, exist_ok=True)
    said = ""
    for how in (("--only-binary=:all:", f"--python-version={PYTHON}"), ("--no-binary=:all:",)):
        with tempfile.TemporaryDirectory(dir=folder) as partial:  # an interrupted download leaves nothing behind
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *how, "-d", partial, requirement]
            done = subprocess.run(command, capture_output=True, text=True)
            if not done.returncode and (found := _archives(Path(partial))):
                return found[0].rename(folder / found[0].name)
            said = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"
    raise AxcoreError(f"cannot download {requirement} ({said}). Give its sources: --source {requirement}=DIR")


def _archives(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*")) if path.name.endswith((".whl", ".tar.gz", ".zip"))]


def archive_sources(archive: Path) -> dict[str, str]:
    """Path -> source of every Python file of a wheel or source distribution, without unpacking it."""
    if archive.suffix == ".gz":
        with tarfile.open(archive) as tar:
            members = [member for member in tar if member.isfile() and member.name.endswith(".py")]
            read = {member.name: tar.extractfile(member).read() for member in members}  # type: ignore[union-attr]
        read = {name.partition("/")[2]: content for name, content in read.items()}  # below the folder NAME-VERSION
    else:
        with zipfile.ZipFile(archive) as zipped:
            read = {name: zipped.read(name) for name in zipped.namelist() if name.endswith(".py")}
    return {name: content.decode(errors="replace") for name, content in read.items()}


def folder_sources(folder: Path) -> dict[str, str]:
    """Path -> source of every Python file below a folder.

    Raises:
        AxcoreError: the folder has no Python files.
    """
    found = {
        path.relative_to(folder).as_posix(): path.read_text(errors="replace") for path in sorted(folder.rglob("*.py"))
    }
    if not found:
        raise AxcoreError(f"{folder} has no Python files")
    return found
