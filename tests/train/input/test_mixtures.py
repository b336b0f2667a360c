"""Mixtures of sources."""

import json

import grain
import pytest

from axcore.config import ConfigError
from axcore.train.data import Document, Mixture, Split, TextFiles, TextInput

from .reading import Numbered, joined, same, take


def mixture(weights, **options):
    source = Mixture.Config(sources={name: Numbered.Config(count=50) for name in weights}, weights=weights)
    return TextInput.Config(source=source, **{"seq_len": 8, "batch_size": 8, "seed": 1, **options})


class Offset(Numbered):
    """Bytes from 100 on."""

    class Config(Numbered.Config):
        repeats: int = 1

    def documents(self, split, piece_bytes):
        contents = range(100, 100 + self.config.count) if split is Split.TRAIN else range(201, 202)
        length = 8 * self.config.repeats - 1
        return grain.MapDataset.source(contents).map(lambda i: Document(f"number {i}", bytes([i] * length)))


@pytest.mark.parametrize("streams", [1, 2, 8])
def test_shares_are_of_tokens_and_hold_in_each_batch(streams):
    sources = {"short": Numbered.Config(count=50), "long": Offset.Config(count=20, repeats=30)}
    source = Mixture.Config(sources=sources, weights={"short": 3.0, "long": 1.0})
    cfg = TextInput.Config(source=source, seq_len=8, batch_size=8, streams=streams, seed=1)
    batches = take(cfg.build().train_batches(), 100)
    of_long = [sum(bool(set(range(100, 200)).intersection(row)) for row in batch["targets"]) for batch in batches]
    assert abs(sum(of_long) - 200) <= 4
    assert all(1 <= count <= 3 for count in of_long)


def test_a_mixture_resumes_on_other_processes():
    cfg = mixture({"a": 0.7, "b": 0.2, "c": 0.1})
    expected = take(cfg.build().train_batches(), 30)
    parts = [cfg.build(process_index=i, process_count=2).train_batches() for i in range(2)]
    assert same(joined([take(part, 13) for part in parts]), expected[:13])
    state = json.loads(json.dumps({k: v for part in parts for k, v in part.get_state().items()}))
    parts = [cfg.build(process_index=i, process_count=4).train_batches() for i in range(4)]
    for part in parts:
        part.set_state(state)
    assert same(joined([take(part, 17) for part in parts]), expected[13:])


def test_mixtures_within_mixtures():
    inner = Mixture.Config(sources={"x": Numbered.Config(), "y": Numbered.Config()}, weights={"x": 1.0, "y": 3.0})
    source = Mixture.Config(sources={"a": inner, "b": Offset.Config()}, weights={"a": 2.0, "b": 2.0})
    assert {name: share for name, (share, _) in source.build().parts().items()} == {
        "a.x": 0.125,
        "a.y": 0.375,
        "b": 0.5,
    }
    cfg = TextInput.Config(source=source, seq_len=8, batch_size=8)
    assert cfg.build().validation_byte_count == 3 * 7
    assert b"".join(cfg.build().validation_bytes()) == bytes([200] * 14 + [201] * 7)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1.0, "b": 0.0}, r"weights must be above 0 in 'b'"),
        ({"a": 1.0}, r"the weights are \['a'\], but the sources are \['a', 'b'\]"),
    ],
)
def test_invalid_weights(weights, message):
    cfg = mixture({"a": 1.0, "b": 1.0})
    with pytest.raises(ConfigError, match=message):
        cfg.set(source=cfg.source.set(weights=weights)).build()


def test_errors_of_a_part_name_its_path(tmp_path):
    source = Mixture.Config(sources={"web": TextFiles.Config(folder=str(tmp_path / "no"))}, weights={"web": 1.0})
    with pytest.raises(ConfigError, match=r"input\.source.*: folder='.*no' does not exist"):
        TextInput.Config(source=source, seq_len=8, batch_size=8).build()
