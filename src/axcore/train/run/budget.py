"""The number of steps of a run that is limited by minutes."""

from __future__ import annotations

import collections
import json
import time
from pathlib import Path

from axcore.config import AxcoreError
from axcore.train.files import os_reason, write_text
from axcore.train.step.program import UNKNOWN_STEPS
from axcore.train.step.schedule import Schedule

PLAN_FILE = "plan.json"
MEASURED_SECONDS = 5.0
"""Shortest time over which the rate is measured."""
BETWEEN_SECONDS = 0.02
"""Shortest time between two recorded steps."""


class Budget:
    """Converts minutes to a number of steps, as late as the schedule allows, since later estimates are more accurate.

    The decision is written to `plan.json` immediately. A resumed run repeats it at the same step, so it follows exactly
    the same schedule.
    """

    def __init__(self, minutes: float, schedule: Schedule, folder: Path, *, began: float):
        """
        Args:
            minutes: wall-clock time from `began` to the last step.
            began: start of the run in `time.monotonic` seconds, moved back by the duration of earlier attempts.
        """
        self._seconds = minutes * 60.0
        self._settle_at = schedule.settled() * self._seconds
        self._file = folder / PLAN_FILE
        self._began = began
        self._recent: collections.deque[tuple[float, int]] = collections.deque(maxlen=2000)
        self._expected: int | None = None
        self.plan = _read(self._file) if self._file.exists() else None

    @property
    def expected(self) -> int | None:
        """The total number of steps: the decision, or the current estimate. None in the first seconds."""
        return self.plan["total_steps"] if self.plan is not None else self._expected

    def total(self, step: int) -> int:
        """The total number of steps that the schedule uses after `step` steps; UNKNOWN_STEPS before the decision."""
        return UNKNOWN_STEPS if self.plan is None or step < self.plan["decided_at"] else self.plan["total_steps"]

    def decide(self, step: int) -> int | None:
        """The total number of steps if it is decided after `step` steps, else None."""
        if self.plan is not None:
            return self.plan["total_steps"] if step == self.plan["decided_at"] else None
        now = time.monotonic()
        if not self._recent or now - self._recent[-1][0] > BETWEEN_SECONDS:
            self._recent.append((now, step))
        since, first = self._recent[0]
        if now - since < MEASURED_SECONDS:
            return None
        spent = now - self._began
        seconds_per_step = (now - since) / max(step - first, 1)
        more = max(1, int((self._seconds - spent) / seconds_per_step))
        self._expected = min(step + more, UNKNOWN_STEPS - 1)
        if spent < self._settle_at:
            return None
        self.plan = {"total_steps": self._expected, "decided_at": step}
        write_text(self._file, json.dumps(self.plan))
        return self._expected


def _read(file: Path) -> dict[str, int]:
    try:
        plan = json.loads(file.read_text())
        if all(type(plan[name]) is int for name in ("total_steps", "decided_at")):
            return dict(plan)
        problem = "the values are not integers"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = os_reason(error)
    raise AxcoreError(
        f'cannot read {file}: {problem}. It must be JSON with the integers "total_steps" and "decided_at". Restore the '
        f"file, or remove it to choose the length of the run again."
    )
