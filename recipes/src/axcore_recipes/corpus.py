"""A corpus that is available on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Annotated

from axcore.config import ConfigError, Range
from axcore.train.data import TextFiles


class StandardLibrary(TextFiles):
    """The Python sources of the running interpreter's standard library, including its tests.

    The text differs slightly between versions of Python, so compare only results of the same version. Python 3.12.1 has
    about 1,690 files (32 MB), of which 33 (476,555 bytes) are for validation. As one stream, zlib -9 compresses the
    validation files to 1.85 bits per byte and lzma to 1.61.
    """

    class Config(TextFiles.Config):
        """The folder is determined at run time, since it differs between machines."""

        folder: str = ""
        """Folder of the sources; empty: the standard library of the running Python, or of the base Python of a virtual
        environment."""
        patterns: tuple[str, ...] = ("**/*.py",)
        exclude: tuple[str, ...] = (
            "**/site-packages",
            "**/dist-packages",
            "**/__pycache__",
            "config-*",
            "_sysconfigdata*.py",
            "sitecustomize.py",
        )
        validation_percent: Annotated[float, Range(above=0, below=100)] = 2.0

    def folder(self) -> Path:
        """The folder of the sources.

        Raises:
            ConfigError: the standard library of the interpreter is not a folder of sources.
        """
        if self.config.folder:
            return super().folder()
        found = Path(sysconfig.get_path("stdlib"))
        if not (found / "os.py").is_file():
            raise ConfigError(
                f"StandardLibrary: {str(found)!r} does not contain the sources of the standard library, as in an "
                f"embedded or zipped Python. Use a full installation of Python, or TextFiles with another folder."
            )
        return found
