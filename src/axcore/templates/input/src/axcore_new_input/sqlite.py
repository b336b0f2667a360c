"""Documents from a SQLite table."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import axcore as ax
from axcore.train.data import Document, Source, Split

if TYPE_CHECKING:  # grain takes over a second to import
    import grain


class SqliteTable(Source):
    """A document for each row of a table. Every `validation_every`-th row id belongs to the validation split."""

    class Config(Source.Config):
        file: str = ax.REQUIRED
        table: str = "documents"
        column: str = "text"
        validation_every: Annotated[int, ax.Range(at_least=2)] = 50

    config: Config

    def __init__(self, cfg: Config):
        self.config = cfg

    def documents(self, split: Split, piece_bytes: int) -> grain.MapDataset[Document]:
        """See `Source.documents`.

        Raises:
            ConfigError: the table cannot be read, or the split is empty.
        """
        import grain

        cfg = self.config
        test = "=" if split is Split.VALIDATION else "!="
        try:
            found = self._query(f'SELECT rowid FROM "{cfg.table}" WHERE rowid % ? {test} 0', cfg.validation_every)
        except sqlite3.Error as error:
            raise ax.ConfigError(f"file={cfg.file!r} cannot be read: {error}") from error
        if not found:
            raise ax.ConfigError(f"file={cfg.file!r} has no rows for {split}; change validation_every or add rows")
        return grain.MapDataset.source([row for (row,) in sorted(found)]).map(self._document)

    def _document(self, row: int) -> Document:
        cfg = self.config
        ((text,),) = self._query(f'SELECT "{cfg.column}" FROM "{cfg.table}" WHERE rowid = ?', row)
        return Document(f"{cfg.file}:{row}", text.encode())

    def _query(self, query: str, argument: int) -> list[Any]:  # Any: the types of the columns
        """Opens the file for each query, because documents may be read in several threads."""
        uri = Path(self.config.file).expanduser().absolute().as_uri() + "?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            return database.execute(query, [argument]).fetchall()
