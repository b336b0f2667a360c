"""The progress display on terminals and elsewhere."""

import io
import sys
import time

import pytest

from axcore.train.callbacks.progress import ProgressDisplay


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class NotToBeTouched:
    """A loss that is still being computed, so that converting it would block."""

    def __float__(self):
        raise AssertionError("waited for a value that is not shown")


@pytest.fixture
def clock():
    return Clock()


def test_without_a_terminal_progress_is_printed_as_lines(clock):
    out = io.StringIO()
    with ProgressDisplay(1000, stream=out, clock=clock) as progress:
        for step in range(1, 101):
            clock.now += 0.5
            progress.update(step, 3.14159 if step in (1, 21, 41, 61, 81, 100) else NotToBeTouched(), 12345.6)
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [
        "1/1000",
        "21/1000",
        "41/1000",
        "61/1000",
        "81/1000",
        "100/1000",
    ]
    assert lines[1] == "step 21/1000  loss 3.1416  12,346 tokens/s  8:10 left"  # 979 steps of 0.5 s


def test_time_left_uses_only_the_steps_of_this_process(clock):
    out = io.StringIO()
    with ProgressDisplay(1100, start=1000, stream=out, clock=clock) as progress:
        clock.now += 100.0
        progress.update(1010, None, None)
    assert out.getvalue() == "step 1010/1100  15:00 left\n"  # 90 steps of 10 s


def test_the_total_may_be_set_later(clock):
    out = io.StringIO()
    with ProgressDisplay(stream=out, clock=clock) as progress:
        progress.update(1, 1.0, None)
        progress.set_total(7201)
        clock.now += 20
        progress.update(2, 1.0, None)
    assert out.getvalue().splitlines() == ["step 1  loss 1.0000", "step 2/7201  loss 1.0000  19:59:50 left"]


def test_bar_on_a_terminal_redraws_ten_times_a_second(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    with ProgressDisplay(1000, stream=out, clock=clock) as progress:
        drawn = 0
        for step in range(1, 1001):
            clock.now += 0.001
            before = len(out.getvalue())
            progress.update(step, 2.5, 1000.0)
            drawn += len(out.getvalue()) > before
        assert 9 <= drawn <= 11
    text = out.getvalue()
    assert "1000/1000" in text and "loss 2.5000" in text and "1,000 tokens/s" in text and "0:00 left" in text


def test_case_at_40_columns_the_step_is_not_cut_off(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    with ProgressDisplay(120_000, stream=out, clock=clock) as progress:
        clock.now += 9999
        progress.update(99_999, 2.5, 123_456.0)
    assert "step 99999/120000  loss 2.5000  123,456…" in out.getvalue()


def test_notes_are_printed_verbatim(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    for out in (Terminal(), io.StringIO()):
        with ProgressDisplay(10, stream=out, clock=clock) as progress:
            progress.update(1, 1.0, 1.0)
            progress.note("saved [bold]checkpoints/1[/bold] in a rather long line of text")
        assert "saved [bold]checkpoints/1[/bold] in a rather long line of text\n" in out.getvalue()


def test_a_closed_stream_does_not_end_the_run(clock):
    for out in (Terminal(), io.StringIO()):
        with ProgressDisplay(10, stream=out, clock=clock) as progress:
            progress.update(1, 1.0, 1.0)
            out.close()
            clock.now += 60
            progress.update(2, 1.0, 1.0)
            progress.note("still here")


def test_writes_to_stderr(capsys):
    with ProgressDisplay(10) as progress:
        progress.update(1, 1.0, 1.0)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("step 1/10")


def test_an_error_propagates_and_stdout_is_restored(clock):
    before = sys.stdout
    with pytest.raises(KeyError), ProgressDisplay(10, stream=Terminal(), clock=clock) as progress:
        progress.update(1, 1.0, 1.0)
        raise KeyError
    assert sys.stdout is before


def test_redirected_stdout_is_not_captured(clock, capsys):
    out = Terminal()
    with ProgressDisplay(10, stream=out, clock=clock):
        print("result")
    assert capsys.readouterr().out == "result\n" and "result" not in out.getvalue()


def test_an_update_is_cheap():
    with ProgressDisplay(10**9, stream=Terminal()) as progress:
        progress.update(0, 1.0, 1.0)
        began = time.perf_counter()
        for step in range(200_000):
            progress.update(step, 1.0, 1.0)
        each = (time.perf_counter() - began) / 200_000
    assert each < 20e-6  # drawing included
