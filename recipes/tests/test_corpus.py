"""The standard library of the running Python as a corpus."""

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from axcore.config import ConfigError
from axcore.train.data import Split
from axcore_recipes.corpus import StandardLibrary


def read(cfg):
    """The documents of each split."""
    source = cfg.build()
    splits = (source.documents(split, 2**30) for split in Split)
    return [[documents[i] for i in range(len(documents))] for documents in splits]


@pytest.fixture(scope="module")
def corpus():
    return read(StandardLibrary.Config())


def test_corpus_is_the_running_standard_library(corpus):
    content = {document.name: document.content for half in corpus for document in half}
    for module in (os, sys.modules["sysconfig"]):  # a module or, from Python 3.13 on, a package
        path = Path(module.__file__)
        assert content[path.relative_to(sysconfig.get_path("stdlib")).as_posix()] == path.read_bytes()


def test_corpus_excludes_installed_packages(corpus):
    names = [document.name for half in corpus for document in half]
    unwanted = {"site-packages", "dist-packages", "__pycache__"}
    assert not [name for name in names if unwanted & set(name.split("/")) or "_sysconfigdata" in name]
    assert {"json/decoder.py", "unittest/mock.py", "os.py"} <= set(names)


def test_corpus_has_the_expected_size(corpus):
    train, validation = (sum(len(d.content) for d in half) for half in corpus)
    assert 7_000_000 < train < 40_000_000  # some distributions omit the tests of the library
    assert 100_000 < validation < 1_000_000


def test_config_contains_no_absolute_path():
    text = StandardLibrary.Config().text()
    assert sysconfig.get_path("stdlib") not in text
    assert 'folder: ""' in text


def test_folder_can_be_set(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.py").write_text(f"x = {i}")
    corpus = read(StandardLibrary.Config(folder=str(tmp_path), validation_percent=30.0))
    assert sum(map(len, corpus)) == 40


@pytest.mark.parametrize("kind", ["missing", "zip", "without sources"])
def test_a_python_without_sources_raises(tmp_path, monkeypatch, kind):
    stdlib = tmp_path / "python312.zip"
    if kind == "zip":
        stdlib.write_bytes(b"PK")
    elif kind == "without sources":
        stdlib.mkdir()
        (stdlib / "os.pyc").write_bytes(b"x")
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(stdlib)}.__getitem__)
    with pytest.raises(ConfigError, match=r"python312\.zip' does not contain the sources of the standard library"):
        read(StandardLibrary.Config())
