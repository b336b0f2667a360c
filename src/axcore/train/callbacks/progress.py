"""Progress of a run: a bar on a terminal; a plain line every 10 seconds elsewhere (log files, batch systems)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TextIO

from axcore.train.callbacks.base import Callback, RunInfo, StepInfo

REDRAW_SECONDS = 0.1
"""Shortest time between two redraws of the bar."""
NARROW = 70
"""Width of a terminal below which a line of text replaces the bar, so that the step is not cut off."""
LINE_SECONDS = 10.0
"""Shortest time between two plain lines."""


class Progress(Callback):
    """Shows steps, loss, tokens per second and the time left, on stderr."""

    class Config(Callback.Config):
        """No fields of its own."""

    first_process_only = True

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._display: ProgressDisplay | None = None

    def start(self, run: RunInfo) -> None:
        self._display = ProgressDisplay(run.total_steps, start=run.step).__enter__()

    def step(self, info: StepInfo) -> None:
        if self._display is not None:
            if info.total_steps != self._display.total:
                self._display.set_total(info.total_steps)
            self._display.update(info.step, info.metrics["loss"], info.metrics.get("tokens_per_second"))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._display is not None:
            self._display.note(f"step {step}  " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))

    def failure(self, error: BaseException) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.__exit__(type(error), error, None)

    def close(self) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.__exit__(None, None, None)


class ProgressDisplay:
    """Shows steps, loss, tokens per second and the time left, on stderr.

    ```python
    with ProgressDisplay(total=1000) as progress:
        for step in range(1000):
            progress.update(step + 1, loss, tokens_per_second)
    ```

    An update that is not drawn takes well under a microsecond. It does not wait for a loss that the device is still
    computing.

    Args:
        total: steps of the whole run; None if unknown.
        start: the step that this process starts from. The speed of a resumed run counts only later steps.
        stream: where to write; stderr by default. A terminal gets a bar, anything else gets lines.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        total: int | None = None,
        *,
        start: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total = total
        self._start = self._step = start
        self._clock = clock
        self._stream = stream if stream is not None else sys.stderr
        self._bar: Any = None
        self._task: Any = None
        self._shown: tuple[int, Any, Any] | None = None
        self._latest: tuple[int, Any, Any] | None = None
        self._began = clock()
        self._due = self._began

    def __enter__(self) -> Self:
        self._began = self._due = self._clock()  # shows the first step at once: compilation is done
        if self._stream.isatty():
            self._bar, self._task = _make_bar(self._stream, self.total, self._start)
            self._guard(self._bar.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._latest != self._shown:
            self._show()
        bar, self._bar = self._bar, None
        if bar is not None:
            self._guard(bar.stop)

    def update(self, step: int, loss: Any, tokens_per_second: Any) -> None:
        """Reports the number of steps done, the loss (nats per token) and the speed. Loss and speed may be None."""
        self._latest = (step, loss, tokens_per_second)
        now = self._clock()
        if now >= self._due:
            self._show()
            self._due = now + (REDRAW_SECONDS if self._bar is not None else LINE_SECONDS)

    def set_total(self, total: int | None) -> None:
        """Changes the number of steps of the whole run."""
        self.total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def note(self, text: str) -> None:
        """Prints a message above the bar, or on its own line."""
        if self._bar is not None:
            self._guard(lambda: self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True))
        else:
            self._print(text)

    def _show(self) -> None:
        if self._latest is None:
            return
        self._shown = self._latest
        self._step, loss, tokens_per_second = self._latest
        figures = _figures(loss, tokens_per_second)
        left = _duration(self._seconds_left())
        of = f"/{self.total}" if self.total is not None else ""
        line = "  ".join(part for part in (f"step {self._step}{of}", figures, left) if part)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._step, figures=figures, left=left, line=line)
            self._guard(self._bar.refresh)
        else:
            self._print(line)

    def _seconds_left(self) -> float | None:
        done = self._step - self._start
        if self.total is None or done <= 0:
            return None
        return max(0, self.total - self._step) * (self._clock() - self._began) / done

    def _print(self, text: str) -> None:
        self._guard(lambda: print(text, file=self._stream, flush=True))

    def _guard(self, show: Callable[[], object]) -> None:
        """Ignores a lost terminal (closed pipe, ended session), so that training continues."""
        try:
            show()
        except (OSError, ValueError):
            self._due = float("inf")


def _make_bar(stream: TextIO, total: int | None, start: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress as RichProgress, TextColumn

    console = Console(file=stream)
    full = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[figures]}"),
        TextColumn("{task.fields[left]}"),
    )
    bar = RichProgress(
        *((TextColumn("{task.fields[line]}"),) if console.width < NARROW else full),
        console=console,
        auto_refresh=False,  # no thread: `update` draws
        redirect_stdout=sys.stdout.isatty(),  # do not intercept output that goes to a file
        expand=True,
    )
    return bar, bar.add_task("step", total=total, completed=start, figures="", left="", line="")


def _figures(loss: Any, tokens_per_second: Any) -> str:
    parts = []
    if loss is not None:
        parts.append(f"loss {float(loss):.4f}")
    if tokens_per_second is not None:
        parts.append(f"{float(tokens_per_second):,.0f} tokens/s")
    return "  ".join(parts)


def _duration(seconds: float | None) -> str:
    """`1:02:03 left`; empty when unknown."""
    if seconds is None:
        return ""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02} left" if hours else f"{minutes}:{seconds_left:02} left"
