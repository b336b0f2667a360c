"""A corpus on disk and an input that reads it."""

import random

import pytest

from axcore.train.data import TextFiles, TextInput


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """name -> content of 40 files with sizes from 1 byte to several windows."""
    rng = random.Random(7)
    return {
        f"{i % 4}/{i:02}.txt": rng.randbytes(rng.choice((1, 5, 40, 130))).replace(b"\0", b"x") or b"x"
        for i in range(40)
    }


@pytest.fixture(scope="module")
def cfg(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    source = TextFiles.Config(folder=str(folder), validation_percent=30.0)
    return TextInput.Config(source=source, seq_len=16, batch_size=12, seed=3, prefetch_batches=5)
