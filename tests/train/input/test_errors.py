"""Errors of the text input."""

import shutil

import pytest

from axcore.config import AxcoreError, ConfigError
from axcore.train.data import TextInput

from .reading import take


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 5}, r"^input: batch_size=5 cannot be split evenly among 2 processes\. Make it a multiple of 2"),
        ({"streams": 5}, "^input: streams=5 is not a divisor of batch_size=12"),
        (
            {"streams": 3},
            "^input: streams=3 cannot be split evenly among 2 processes.* divisor of batch_size=12 .* multiple of 2",
        ),
        (
            {"batch_size": 1000},
            r"input.source: .* has \d+ tokens, fewer than one batch of batch_size=1000 rows of seq_",
        ),
        ({"seq_len": 100_000}, "tokens, fewer than one batch of .* seq_len=100000"),
    ],
)
def test_numbers_out_of_range(cfg, options, message):
    with pytest.raises(ConfigError, match=message):
        cfg.set(**options).build(process_index=0, process_count=2)


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0)])
def test_process_index_out_of_range(cfg, index, count):
    with pytest.raises(ValueError, match="process_index"):
        cfg.build(process_index=index, process_count=count)


def test_required_fields():
    with pytest.raises(ConfigError, match="seq_len, batch_size, source is REQUIRED"):
        TextInput.Config().build()


@pytest.mark.parametrize("prefetch_batches", [0, 4])
def test_an_error_while_reading_names_the_document(cfg, files, tmp_path, prefetch_batches):
    shutil.copytree(cfg.source.folder, tmp_path / "copy")
    source = cfg.source.set(folder=str(tmp_path / "copy"))
    inp = cfg.set(source=source, prefetch_batches=prefetch_batches).build()
    last = next(n for n in sorted(files, reverse=True) if not source.build().is_validation(n) and len(files[n]) > 30)
    (tmp_path / "copy" / last).unlink()
    batches = inp.train_batches()
    with pytest.raises(AxcoreError, match=f"cannot read .*{last}: No such file"):
        take(batches, 1000)
    batches.close()
