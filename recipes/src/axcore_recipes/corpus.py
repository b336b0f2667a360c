"""Corpora that are on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from axcore.config import ConfigError
from axcore.train.data import TextFiles


class StandardLibrary(TextFiles):
    """The Python sources of the running interpreter's own standard library, its tests included.

    Versions of Python differ a little, so compare results of one version only. Of Python 3.12.1 there are some 1,690
    files, 32 MB; 33 of them (476,555 bytes) are for validation, and as one stream zlib -9 takes those to 1.85 bits
    per byte and lzma to 1.61.
    """

    class Config(TextFiles.Config):
        """The folder is found when it is read, for it differs between machines."""

        folder: str = ""
        """Empty: that of the running Python (in a virtual environment, of the Python that it is based on)."""
        patterns: tuple[str, ...] = ("**/*.py",)
        exclude: tuple[str, ...] = (
            "**/site-packages",
            "**/dist-packages",
            "**/__pycache__",
            "config-*",
            "_sysconfigdata*.py",
            "sitecustomize.py",
        )
        validation_percent: float = 2.0

    def folder(self) -> Path:
        """
        Raises:
            ConfigError: the interpreter's standard library is not a folder of sources.
        """
        if self.cfg.folder:
            return super().folder()
        found = Path(sysconfig.get_path("stdlib"))
        if not (found / "os.py").is_file():
            raise ConfigError(
                f"StandardLibrary: {str(found)!r} holds no sources of the standard library (is this Python "
                f"embedded or zipped?); run a full installation, or use TextFiles with a folder of your own"
            )
        return found
