"""Text files and JSON lines: selection, splitting and errors."""

import hashlib
import json
import os
from typing import NamedTuple

import grain
import pytest

from axcore.config import AxcoreError, ConfigError, override
from axcore.train.data import Document, JsonLines, Mixture, Source, Split, TextFiles, TextInput
from axcore.train.data.text_files import Skip


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def many(count=200):
    return {f"d{i % 7}/f{i}.txt": f"document {i}".encode() for i in range(count)}


class Corpus(NamedTuple):
    train: list
    validation: list
    skipped: dict


def read(folder, *, piece_bytes=2**20, **options):
    source = TextFiles.Config(folder=str(folder), **options).build()
    halves = (source.documents(split, piece_bytes) for split in Split)
    return Corpus(*([half[i] for i in range(len(half))] for half in halves), dict(source.index.skipped))


def names(corpus):
    return sorted({document.name for document in corpus.train + corpus.validation})


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


def test_a_new_file_does_not_change_the_split_of_others(tmp_path):
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
def test_patterns_select_files(tmp_path, monkeypatch, patterns, exclude, expected):
    files = ("a.txt", "x/b.txt", "x/test/c.txt", "x/y/d.txt", "x/e.md")
    write(tmp_path, {name: name.encode() for name in files})
    monkeypatch.setattr(TextFiles, "_check_splits", lambda *args: None)  # with so few files, one split may be empty
    assert names(read(tmp_path, patterns=patterns, exclude=exclude)) == expected


def test_case_files_that_are_not_text_are_counted(tmp_path):
    write(tmp_path, many())
    write(tmp_path, {"empty.txt": b"", "nul.txt": b"a\0b", "copy.txt": b"document 3", "large.txt": b"x" * 1001})
    write(tmp_path, {"latin.txt": b"\xe9", "limit.txt": b"y" * 1000})
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling.txt")
    os.mkfifo(tmp_path / "pipe.txt")  # opening it would block forever
    corpus = read(tmp_path, validation_percent=20.0, max_file_bytes=1000, allow_unreadable=True)
    assert corpus.skipped == {
        Skip.EMPTY: 1,
        Skip.NOT_TEXT: 1,
        Skip.DUPLICATE: 1,
        Skip.TOO_LARGE: 1,
        Skip.UNREADABLE: 2,
    }
    # The copy has the first path, so it is kept and the original is skipped.
    assert names(corpus) == sorted({*many(), "copy.txt", "latin.txt", "limit.txt"} - {"d3/f3.txt"})


def test_no_content_is_in_both_splits(tmp_path):
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


def test_a_missing_folder_raises(tmp_path):
    with pytest.raises(ConfigError, match=r"folder='.*/nowhere' does not exist"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize("folder", ["", "a\0b", "~nobody-here/texts"])
def test_an_invalid_path_raises(folder):
    with pytest.raises(ConfigError, match=r"folder=.* Give "):
        read(folder)


@pytest.mark.parametrize("piece_bytes", [64, 2**20])
@pytest.mark.parametrize("content", [b"".join(b"line %d\n" % n for n in range(1000)), b"no line end " * 800, b"ab"])
def test_the_end_of_a_single_file_is_for_validation(tmp_path, content, piece_bytes):
    write(tmp_path, {"a.txt": content, "copy.txt": content, "b.md": b"another"})
    corpus = read(tmp_path, validation_percent=10.0, piece_bytes=piece_bytes)
    train, validation = (b"".join(each.content for each in half) for half in (corpus.train, corpus.validation))
    assert train + validation == content and train and validation
    if len(content) > 2:
        assert 0.09 < len(validation) / len(content) <= 0.1
    if b"\n" in content:
        assert train.endswith(b"\n")
    for half in (corpus.train, corpus.validation):
        assert half[0].starts and half[-1].ends


def test_case_a_run_trains_on_a_single_file(tmp_path):
    write(tmp_path, {"a.txt": b"".join(b"line %d\n" % n for n in range(1000))})
    source = TextFiles.Config(folder=str(tmp_path))
    made, moved = (
        TextInput.Config(seq_len=16, batch_size=2, source=source.set(validation_percent=percent)).build()
        for percent in (2.0, 10.0)
    )
    assert next(made.train_batches())["inputs"].shape == (2, 16)
    assert 150 < made.validation_byte_count == sum(map(len, made.validation_bytes())) < 190
    assert made.identity()["training_text"] != moved.identity()["training_text"]


def test_a_file_in_place_of_a_folder_raises(tmp_path):
    write(tmp_path, {"a.txt": b"a"})
    with pytest.raises(ConfigError, match=r"a\.txt' is not a folder"):
        read(tmp_path / "a.txt")


def test_a_folder_without_matching_files_raises(tmp_path):
    write(tmp_path, {"a.md": b"a"})
    with pytest.raises(ConfigError, match=r"no text in .*: no file matches\. Change .*patterns=\('\*\*/\*\.txt',\)"):
        read(tmp_path)


def test_a_folder_of_only_skipped_files_raises(tmp_path):
    write(tmp_path, {"a.txt": b"", "b.txt": b"\0", "c.txt": b""})
    with pytest.raises(ConfigError, match=r"all files that match were skipped \(2 empty, 1 not text\)"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("percent", "message"),
    [
        (
            0.001,
            "all 3 files are in training, but validation requires at least one. Raise validation_percent",
        ),
        (
            99.999,
            "all 3 files are in validation, but training requires at least one. Lower validation_percent",
        ),
    ],
)
def test_an_empty_split_raises(tmp_path, percent, message):
    write(tmp_path, {f"{n}.txt": n.encode() for n in "abc"})
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, validation_percent=percent)


@pytest.mark.parametrize("percent", [0.0, 100.0, -1.0, float("nan")])
def test_a_percentage_out_of_range_raises(percent):
    with pytest.raises(ConfigError, match=r"validation_percent must be (finite and )?above 0 and below 100"):
        TextFiles.Config(folder="x", validation_percent=percent).build()


def test_config_takes_overrides():
    cfg = override(TextFiles.Config(folder="x"), ["patterns=**/*.md,**/*.rst", "max_file_bytes=10"])
    assert cfg.patterns == ("**/*.md", "**/*.rst")
    assert cfg.max_file_bytes == 10


def test_case_unreadable_files_raise_and_are_named(tmp_path):
    write(tmp_path, many())
    for number in range(20):
        os.symlink(tmp_path / "nowhere", tmp_path / f"{number:02}.txt")
    with pytest.raises(ConfigError, match=r"cannot read 00\.txt \(No such file or directory\), .* and 15 more "):
        read(tmp_path)


def test_case_text_that_is_left_out_is_said(tmp_path, capsys):
    write(tmp_path, {**many(), "nul.txt": b"\0", "copy.txt": b"document 3"})
    os.symlink(tmp_path / "nowhere", tmp_path / "absent.txt")
    source = TextFiles.Config(folder=str(tmp_path), validation_percent=20.0, allow_unreadable=True)
    mixed = Mixture.Config(sources={"mine": source}, weights={"mine": 1.0})
    for process in range(2):
        for each in (source, mixed):
            TextInput.Config(source=each, seq_len=8, batch_size=2).build(process_index=process, process_count=2)
    said = "left out 3 texts: 1 duplicate, 1 not text, 1 unreadable"  # by the first process only
    assert capsys.readouterr().err.splitlines() == [f"input.source: {said}", f"input.source.sources.mine: {said}"]


def test_without_check_content_binary_and_duplicate_files_stay(tmp_path, monkeypatch):
    write(tmp_path, {**many(), "nul.txt": b"\0", "copy.txt": b"document 3"})
    corpus = read(tmp_path, validation_percent=20.0, check_content=False)
    assert names(corpus) == sorted([*many(), "nul.txt", "copy.txt"])


@pytest.mark.parametrize("piece_bytes", [4, 10, 64, 100_000])
def test_pieces_join_to_the_file(tmp_path, piece_bytes):
    files = {}
    for i in range(1, 9):
        files[f"{i}.txt"] = "".join(f"ä{j}\n" if j % 9 < i else f"–{j}" for j in range(40 * i)).encode()
    corpus = read(write(tmp_path, files), piece_bytes=piece_bytes, validation_percent=30.0)
    joined: dict[str, list] = {}
    for piece in corpus.train + corpus.validation:
        joined.setdefault(piece.name.partition(" (")[0], []).append(piece)
    assert joined.keys() == files.keys()
    for name, pieces in joined.items():
        assert b"".join(piece.content for piece in pieces) == files[name]
        assert [piece.starts for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert all(len(piece.content) <= 2.5 * piece_bytes for piece in pieces)
        if piece_bytes >= 10:
            assert [piece.content.decode() for piece in pieces]  # no cut within a character


def test_a_file_that_shrinks_or_disappears_raises(tmp_path):
    write(tmp_path, many())
    source = TextFiles.Config(folder=str(tmp_path), validation_percent=20.0).build()
    documents = source.documents(Split.TRAIN, 100)
    name = documents[3].name
    (tmp_path / name).write_bytes(b"d")
    with pytest.raises(AxcoreError, match=rf"{name} has become shorter since the run started"):
        documents[3]
    (tmp_path / name).unlink()
    with pytest.raises(AxcoreError, match=rf"cannot read .*{name}: No such file"):
        documents[3]


# JSON lines.


def json_lines(path, lines, **options):
    path.write_text("\n".join(lines) + "\n" * options.pop("final_newline", True))
    source = JsonLines.Config(file=str(path), **options).build()
    return [[half[i] for i in range(len(half))] for half in (source.documents(split, 64) for split in Split)]


@pytest.mark.parametrize("final_newline", [True, False])
def test_json_lines_are_read_and_split(tmp_path, monkeypatch, final_newline):
    monkeypatch.setattr("axcore.train.data.json_lines._READ_BYTES", 50)
    texts = [f"text {i} " + "ü" * (i % 40) for i in range(300)]
    lines = [json.dumps({"id": i, "text": text}) if i % 7 else "" for i, text in enumerate(texts)]
    train, validation = json_lines(tmp_path / "x.jsonl", lines, validation_percent=20.0, final_newline=final_newline)
    read = {int(d.name.rpartition(":")[2]) - 1: d.content.decode() for d in train + validation}
    assert read == {i: text for i, text in enumerate(texts) if i % 7}
    assert 20 < len(validation) < 90
    assert len(train) + len(validation) == len(read)
    assert (
        train == json_lines(tmp_path / "x.jsonl", [*lines, '{"text": "new"}'], validation_percent=20.0)[0][: len(train)]
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "is not valid JSON: Expecting value"),
        ('{"other": 1}', r"must be a JSON object with the field 'text', got one with \['other'\]"),
        ('["text"]', "must be a JSON object with the field 'text', got list"),
        ('{"text": 7}', "the field 'text' must be a string, got int"),
    ],
)
def test_an_invalid_json_line_raises(tmp_path, line, message):
    with pytest.raises(AxcoreError, match=rf"x\.jsonl:\d+:? {message}"):
        json_lines(tmp_path / "x.jsonl", [line] * 100, validation_percent=20.0)


def test_a_missing_or_too_short_json_lines_file_raises(tmp_path):
    with pytest.raises(ConfigError, match=r"file='.*' cannot be read: No such file"):
        JsonLines.Config(file=str(tmp_path / "no")).build().documents(Split.TRAIN, 64)
    with pytest.raises(ConfigError, match=r"too few lines: with validation_percent=2.0 no line is in validation"):
        json_lines(tmp_path / "x.jsonl", ['{"text": "a"}'])


class Faulty(Source):
    """Breaks the contract of sources."""

    class Config(Source.Config):
        kind: str = "list"

    def documents(self, split, piece_bytes):
        found = [Document(f"{n}", "text" if self.config.kind == "text" else b"text" * 9) for n in range(40)]
        return found if self.config.kind == "list" else grain.MapDataset.source(found)

    def fingerprint(self, piece_bytes):
        return "none"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("list", r"input\.source: documents\(\) must return a grain\.MapDataset of Document, not list"),
        ("text", r"0: Document\.content must be bytes, not str"),
    ],
)
def test_a_source_that_breaks_its_contract_is_named(kind, message):
    with pytest.raises(AxcoreError, match=message):
        TextInput.Config(source=Faulty.Config(kind=kind), seq_len=8, batch_size=2, seed=0).build()
