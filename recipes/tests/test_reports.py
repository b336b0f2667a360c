"""Compression baselines and the loss plot."""

import itertools
import json
import lzma
import math
import os
import sys
import zlib

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from axcore_recipes.reports import compression_bits_per_byte, plot_losses, read_series, smooth


def test_constant_bytes_compress_and_random_bytes_do_not():
    random = compression_bits_per_byte([os.urandom(50_000)])
    assert all(8 <= value < 8.1 for value in random.values())
    equal = compression_bits_per_byte([b"a" * 50_000])
    assert all(0 < value < 0.05 for value in equal.values())


def test_chunks_are_compressed_as_one_stream():
    data = b"".join(b"def f%d(x):\n    return x + %d\n" % (i, i * i) for i in range(2000))
    figures = compression_bits_per_byte([data])
    z, x = (figures[f"{name}_bits_per_byte"] * len(data) / 8 for name in ("zlib", "lzma"))
    assert z == pytest.approx(len(zlib.compress(data, 9)))
    assert x == pytest.approx(len(lzma.compress(data, preset=9)), rel=0.02)
    assert x < z < len(data) / 2


def test_an_empty_text_raises():
    with pytest.raises(ValueError, match="no bytes"):
        compression_bits_per_byte([b""])


@pytest.fixture
def metrics(tmp_path):
    def write(lines, end="\n"):
        path = tmp_path / "metrics.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)
        return path

    return write


def test_series_are_sorted_by_step(metrics):
    path = metrics(
        [
            {"step": 20, "train/loss": 2},
            {"step": 10, "train/loss": 3.0, "validation/bits_per_byte": 4.0},
            "",
            {"step": 30, "train/loss": float("nan")},
            {"step": 40, "train/lr": 0.1, "train/loss": None},
            {"step": 20, "train/loss": 1.5},  # a resumed run wrote this step again
        ]
    )
    assert read_series(path, "train/loss") == [(10, 3.0), (20, 1.5)]
    assert read_series(path, "validation/bits_per_byte") == [(10, 4.0)]


def test_an_incomplete_last_line_is_skipped(metrics):
    path = metrics([{"step": 1, "train/loss": 2.0}, '{"step": 2, "tra'], end="")
    assert read_series(path, "train/loss") == [(1, 2.0)]


@pytest.mark.parametrize("line", ['{"step": 2, "tra', "[]", "{}", '{"step": "x"}'])
def test_any_other_invalid_line_raises(metrics, line):
    path = metrics([{"step": 1}, line, {"step": 3}])
    with pytest.raises(ValueError, match="line 2: not a JSON object with a step"):
        read_series(path, "train/loss")


def test_smoothing_averages_neighbours():
    assert smooth((1.0, 2.0, 6.0, 3.0, 1.0), 1) == [1.0, 3.0, 11 / 3, 10 / 3, 2.0]
    assert smooth((4.0, 8.0), 0) == [4.0, 8.0]


def run_of(count):
    return [
        {"step": i, "train/loss": (1.5 + 6 / i) * math.log(2)}
        | ({"validation/bits_per_byte": 1.7} if i % 50 == 0 else {})
        for i in range(1, count + 1)
    ]


BASELINES = {"zlib_bits_per_byte": 2.1, "lzma_bits_per_byte": 1.8}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])
    return figures


def test_plot_shows_losses_and_baselines(metrics, tmp_path, drawn):
    plot_losses(metrics(run_of(200)), tmp_path / "loss.png", title="A run", baselines=BASELINES)
    [axes] = drawn[0].axes
    lines = [(line.get_xdata(), line.get_ydata()) for line in axes.get_lines()]
    raw = next(y for x, y in lines if len(x) == 200)
    assert raw == pytest.approx([1.5 + 6 / i for i in range(1, 201)])  # bits, not nats
    validation = next((list(x), list(y)) for x, y in lines if len(x) == 4)
    assert validation == ([50, 100, 150, 200], [1.7] * 4)
    assert {y[0] for x, y in lines if len(x) == 2} == {2.1, 1.8}
    texts = {text.get_text() for text in axes.texts}
    assert texts == {"zlib 2.10", "lzma 1.80", "validation 1.70", "training"}
    assert axes.get_title(loc="left") == "A run"
    low, high = axes.get_ylim()
    assert low < 1.5 and high > 2.1

    image = imread(tmp_path / "loss.png")
    assert image.shape[:2] == (720, 1200)
    colors = {tuple(color) for color in (np.unique(image.reshape(-1, image.shape[2])[:, :3], axis=0) * 255).round()}
    assert {(0x4C, 0x78, 0xA8), (0xD1, 0x49, 0x5B)} <= colors


def test_labels_do_not_overlap(metrics, tmp_path, drawn):
    close = {"zlib_bits_per_byte": 1.701, "lzma_bits_per_byte": 1.7}
    plot_losses(metrics(run_of(200)), tmp_path / "loss.png", baselines=close)
    boxes = sorted((t.get_window_extent() for t in drawn[0].axes[0].texts), key=lambda box: box.y0)
    assert len(boxes) == 4
    assert all(below.y1 <= above.y0 + 1 for below, above in itertools.pairwise(boxes))
    assert all(box.x1 <= 1200 for box in boxes)


@pytest.mark.parametrize(
    "entries",
    [[{"step": 1, "train/loss": 2.0}], [{"step": 0, "validation/bits_per_byte": 3.0}], run_of(3), run_of(60)],
    ids=["one step", "only validation", "short", "no baselines"],
)
def test_runs_of_any_length_are_plotted(metrics, tmp_path, entries):
    plot_losses(metrics(entries), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_loss_is_converted_to_bits_per_byte(metrics, tmp_path, drawn):
    path = metrics([{"step": i, "train/loss": 4 * math.log(2)} for i in (1, 2, 3)])
    plot_losses(path, tmp_path / "loss.png", bytes_per_token=4.0)
    assert list(drawn[0].axes[0].get_lines()[0].get_ydata()) == pytest.approx([1.0] * 3)


def test_metrics_without_losses_raise(metrics, tmp_path):
    with pytest.raises(ValueError, match="has neither"):
        plot_losses(metrics([{"step": 1}]), tmp_path / "loss.png")


def test_pyplot_is_not_imported(metrics, tmp_path):
    plot_losses(metrics(run_of(60)), tmp_path / "loss.png")
    assert "matplotlib.pyplot" not in sys.modules
