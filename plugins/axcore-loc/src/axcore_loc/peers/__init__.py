"""`axcore loc peers`: lines of other systems that mention a feature, as a function of the number of their models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from axcore.config import AxcoreError
from axcore_loc.peers.count import count
from axcore_loc.peers.fetch import default_cache, sources
from axcore_loc.peers.report import Peers
from axcore_loc.peers.systems import SYSTEMS


def run(cache: Path | None, given: Sequence[str], progress: Callable[[str], None]) -> Peers:
    """Counts every system. The result lists releases whose sources are not available, with the reason.

    Args:
        cache: folder for downloads; None for the user's cache folder.
        given: `NAME@VERSION=DIR` or `NAME==VERSION=DIR`, for releases to read from a folder.

    Raises:
        AxcoreError: an item of `given` is malformed or names an unknown release.
    """
    folders = dict(map(_given, given))
    known = {part for system in SYSTEMS for release in system.releases for part in release}
    if unknown := folders.keys() - known:
        raise AxcoreError(f"--source {', '.join(sorted(unknown))}: unknown release. Known: {', '.join(sorted(known))}")
    counts, missing = [], {}
    for system in SYSTEMS:
        for release in system.releases:
            label = ", ".join(release)
            progress(label)
            read = functools.partial(sources, cache=cache or default_cache(), given=folders)
            try:
                texts = {path: text for part in release for path, text in read(part).items()}
            except AxcoreError as error:
                missing[label] = str(error)
                continue
            counts += count(system, label, texts)
    return Peers(tuple(counts), missing)


def _given(text: str) -> tuple[str, Path]:
    release, _, folder = text.rpartition("=")
    if not release or not Path(folder).is_dir():
        raise AxcoreError(f"--source requires NAME@VERSION=DIR with an existing folder, not {text!r}")
    return release, Path(folder)
