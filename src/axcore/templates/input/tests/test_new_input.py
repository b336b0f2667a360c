"""Tests of axcore-new-input."""

import contextlib
import sqlite3

import pytest

import axcore as ax
from axcore.train.data import Split
from axcore_new_input.sqlite import SqliteTable


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts.db"
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE documents (text)")
        database.executemany("INSERT INTO documents VALUES (?)", [(f"document {row}",) for row in range(1, 7)])
    return str(path)


def test_every_third_row_is_for_validation(file):
    source = SqliteTable.Config(file=file, validation_every=3).build()
    train, validation = (source.documents(split, piece_bytes=4096) for split in Split)
    assert [document.content for document in validation] == [b"document 3", b"document 6"]
    assert len(train) == 4 and train[2].content == b"document 4"


def test_a_file_without_the_table_is_refused(file):
    with pytest.raises(ax.ConfigError, match="cannot be read: no such table: texts"):
        SqliteTable.Config(file=file, table="texts").build().documents(Split.TRAIN, piece_bytes=4096)
