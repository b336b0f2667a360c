"""Text files: what is read, how it is split, and what is said when it cannot be."""

import hashlib
import os

import pytest

from axcore.config import ConfigError, override
from axcore.train.data import TextFiles
from axcore.train.data.sources import Skip


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def many(count=200):
    return {f"d{i % 7}/f{i}.txt": f"document {i}".encode() for i in range(count)}


def read(folder, **options):
    return TextFiles.Config(folder=str(folder), **options).build().read()


def names(corpus):
    return sorted(document.name for document in corpus.train + corpus.validation)


def test_split_is_the_published_hash_of_the_path(tmp_path):
    files = many()
    corpus = read(write(tmp_path, files), validation_percent=25.0)
    chosen = sorted(n for n in files if int(hashlib.sha256(n.encode()).hexdigest()[:16], 16) < 2**64 // 4)
    assert [document.name for document in corpus.validation] == chosen
    assert [document.name for document in corpus.train] == sorted(set(files) - set(chosen))
    assert 30 < len(chosen) < 70
    assert all(document.content == files[document.name] for document in corpus.train + corpus.validation)


def test_split_of_these_paths_never_changes(tmp_path):
    files = TextFiles.Config(folder=str(tmp_path), validation_percent=30.0).build()
    assert [n for n in "abcdefghij" if files.is_validation(f"{n}.txt")] == ["a", "j"]
    assert not files.is_validation("ä/ö.txt")


def test_split_does_not_depend_on_the_order_of_listing(tmp_path, monkeypatch):
    write(tmp_path, many())
    expected = read(tmp_path, validation_percent=20.0)
    real_walk = os.walk

    def backwards(*args, **kwargs):
        for parent, folders, files in real_walk(*args, **kwargs):
            folders.reverse()
            yield parent, folders, files[::-1]

    monkeypatch.setattr(os, "walk", backwards)
    assert read(tmp_path, validation_percent=20.0) == expected


def test_another_file_moves_no_other(tmp_path):
    write(tmp_path, many())
    before = read(tmp_path, validation_percent=20.0)
    write(tmp_path, {"a/new.txt": b"new"})
    after = read(tmp_path, validation_percent=20.0)
    assert set(before.train) <= set(after.train)
    assert set(before.validation) <= set(after.validation)


@pytest.mark.parametrize(
    ("patterns", "exclude", "expected"),
    [
        (("**/*.txt",), (), ["a.txt", "x/b.txt", "x/test/c.txt", "x/y/d.txt"]),
        (("*.txt",), (), ["a.txt"]),
        (("x/*.txt",), (), ["x/b.txt"]),
        (("x/**/*.txt",), (), ["x/b.txt", "x/test/c.txt", "x/y/d.txt"]),
        (("**/*.md", "a.*"), (), ["a.txt", "x/e.md"]),
        (("**/*.txt",), ("**/test",), ["a.txt", "x/b.txt", "x/y/d.txt"]),
        (("**/*.txt",), ("x/test/**",), ["a.txt", "x/b.txt", "x/y/d.txt"]),
        (("**/*.txt",), ("test",), ["a.txt", "x/b.txt", "x/test/c.txt", "x/y/d.txt"]),
        (("**/*.txt",), ("**/d.txt", "a.*"), ["x/b.txt", "x/test/c.txt"]),
        (("**/[ad].txt",), (), ["a.txt", "x/y/d.txt"]),
    ],
)
def test_patterns(tmp_path, monkeypatch, patterns, exclude, expected):
    files = ("a.txt", "x/b.txt", "x/test/c.txt", "x/y/d.txt", "x/e.md")
    write(tmp_path, {name: name.encode() for name in files})
    monkeypatch.setattr(TextFiles, "_check", lambda *args: None)  # so few files may all fall into one half
    assert names(read(tmp_path, patterns=patterns, exclude=exclude)) == expected


def test_files_that_are_no_text_are_counted(tmp_path):
    write(tmp_path, many())
    write(tmp_path, {"empty.txt": b"", "nul.txt": b"a\0b", "copy.txt": b"document 3", "large.txt": b"x" * 1001})
    write(tmp_path, {"latin.txt": b"\xe9", "limit.txt": b"y" * 1000})
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling.txt")
    os.mkfifo(tmp_path / "pipe.txt")  # opening it would wait for ever
    corpus = read(tmp_path, validation_percent=20.0, max_file_bytes=1000)
    assert corpus.skipped == {
        Skip.EMPTY: 1,
        Skip.NOT_TEXT: 1,
        Skip.DUPLICATE: 1,
        Skip.TOO_LARGE: 1,
        Skip.UNREADABLE: 2,
    }
    # The copy comes first by path, so it stays and the original goes.
    assert names(corpus) == sorted({*many(), "copy.txt", "latin.txt", "limit.txt"} - {"d3/f3.txt"})


def test_no_content_is_in_both_halves(tmp_path):
    write(tmp_path, {f"{copy}/{name}": content for copy in "abc" for name, content in many(50).items()})
    corpus = read(tmp_path, validation_percent=40.0)
    assert not {d.content for d in corpus.train} & {d.content for d in corpus.validation}
    assert len(corpus.train) + len(corpus.validation) == 50
    assert corpus.skipped == {Skip.DUPLICATE: 100}


def test_links_are_followed_once_and_loops_end(tmp_path):
    write(tmp_path / "data", many())
    write(tmp_path / "elsewhere", {"far.txt": b"far"})
    os.symlink(tmp_path / "data", tmp_path / "data" / "d1" / "loop")
    os.symlink("../d2", tmp_path / "data" / "d3" / "again")
    os.symlink(tmp_path / "elsewhere", tmp_path / "data" / "out")
    os.symlink(tmp_path / "data", tmp_path / "link")
    corpus = read(tmp_path / "link", validation_percent=20.0)
    assert names(corpus) == sorted([*many(), "out/far.txt"])
    assert corpus.skipped == {}


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "texts", many())
    assert len(names(read("~/texts", validation_percent=20.0))) == 200


def test_a_folder_that_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"TextFiles\.folder: '.*/nowhere' does not exist"):
        read(tmp_path / "nowhere")


def test_a_folder_that_is_a_file(tmp_path):
    write(tmp_path, {"a.txt": b"a"})
    with pytest.raises(ConfigError, match=r"a\.txt' is a file, not a folder"):
        read(tmp_path / "a.txt")


def test_a_folder_without_text(tmp_path):
    write(tmp_path, {"a.md": b"a"})
    with pytest.raises(ConfigError, match=r"no text in .*: no file matches; patterns=\('\*\*/\*\.txt',\)"):
        read(tmp_path)


def test_a_folder_with_nothing_to_read(tmp_path):
    write(tmp_path, {"a.txt": b"", "b.txt": b"\0", "c.txt": b""})
    with pytest.raises(ConfigError, match=r"all that matches was skipped \(2 empty, 1 not text\)"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("percent", "message"),
    [
        (
            0.001,
            "3 files in .* all fell into training and none into validation .*; raise validation_percent",
        ),
        (
            99.999,
            "3 files in .* all fell into validation and none into training .*; lower validation_percent",
        ),
    ],
)
def test_one_half_is_empty(tmp_path, percent, message):
    write(tmp_path, {f"{n}.txt": n.encode() for n in "abc"})
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, validation_percent=percent)


@pytest.mark.parametrize("percent", [0.0, 100.0, -1.0, float("nan")])
def test_percent_out_of_range(percent):
    with pytest.raises(ConfigError, match="validation_percent must lie between 0 and 100"):
        TextFiles.Config(folder="x", validation_percent=percent).build()


def test_config_takes_overrides():
    cfg = override(TextFiles.Config(folder="x"), ["patterns=**/*.md,**/*.rst", "max_file_bytes=10"])
    assert cfg.patterns == ("**/*.md", "**/*.rst")
    assert cfg.max_file_bytes == 10
