"""Reading two states of a repository: a commit, and the working tree."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from axcore.config import AxcoreError


class GitError(AxcoreError):
    """git failed. The message explains what to do."""


@dataclasses.dataclass(frozen=True)
class Repository:
    """A checkout and one commit of it, the base."""

    root: Path
    base: str

    @classmethod
    def at(cls, folder: Path, base: str) -> Repository:
        """The repository that holds a folder.

        Raises:
            GitError: the folder is not in a repository, or the repository lacks the base.
        """
        top = _run(folder, "rev-parse", "--show-toplevel")
        if top.returncode:
            raise GitError(f"{folder} is not in a git repository. Run this in a checkout ({_said(top)}).")
        root = Path(top.stdout.decode().strip())
        found = _run(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}")
        if found.returncode:
            shallow = _run(root, "rev-parse", "--is-shallow-repository").stdout.decode().strip() == "true"
            remedy = (
                "this clone is shallow and may lack the commit: run git fetch --unshallow (in CI, fetch the whole "
                "history, or only the commit: git fetch --depth=1 origin COMMIT)"
                if shallow
                else "give a branch, a tag or a commit that `git log` shows"
            )
            raise GitError(f"--base {base}: the commit does not exist here; {remedy}")
        return cls(root, found.stdout.decode().strip())

    def base_files(self) -> list[str]:
        return _lines(_must(self.root, "ls-tree", "-r", "-z", "--name-only", self.base))

    def now_files(self) -> list[str]:
        """The files in the working tree, except ignored ones."""
        listed = _lines(_must(self.root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"))
        return [path for path in dict.fromkeys(listed) if (self.root / path).is_file()]

    def base_text(self, path: str) -> str:
        return _must(self.root, "show", f"{self.base}:{path}").decode(errors="replace")

    def now_text(self, path: str) -> str:
        return (self.root / path).read_text(errors="replace")

    def changed(self) -> Iterator[tuple[str, str]]:
        """(path in the base, current path) of every changed file of the base. The second is empty if it was deleted."""
        parts = iter(_lines(_must(self.root, "diff", "--name-status", "-z", "--find-renames", self.base, "--")))
        for status in parts:
            path = next(parts)
            if status[0] in "RC":
                renamed = next(parts)
                if status[0] == "R":
                    yield path, renamed
            elif status[0] != "A":
                yield path, "" if status[0] == "D" else path


Reader = Callable[[str], str]
"""Path -> text."""


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    try:
        command = ["git", "-c", "core.quotePath=false", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, env={**os.environ, "LC_ALL": "C"})
    except OSError as error:
        raise GitError(f"git could not be run in {folder}: {error}; is it installed?") from error


def _must(folder: Path, *arguments: str) -> bytes:
    done = _run(folder, *arguments)
    if done.returncode:
        raise GitError(f"git {' '.join(arguments)} failed: {_said(done)}")
    return done.stdout


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stderr.decode(errors="replace").strip().splitlines()[-1] if done.stderr.strip() else "no message"


def _lines(output: bytes) -> list[str]:
    return [part.decode(errors="replace") for part in output.split(b"\0") if part]
