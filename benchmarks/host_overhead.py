"""Time of Python between the steps of a run of the quickstart recipe, with its writers, logging each step.

Prints a JSON object on the last line: `host_ms_p50` and `host_ms_p90`, the time between one step call and the next,
without waiting for the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import jax

from axcore.plugin import recipe
from axcore.train.run import session

AT_THE_END = "compressors", "loss_plot", "sample"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    cfg = recipe("quickstart").set(steps=steps, minutes=None)
    cfg = cfg.set(callbacks={name: each for name, each in cfg.callbacks.items() if name not in AT_THE_END})
    seconds: list[float] = []

    class Recorded(session.Loop):  # the trainer only reports the median
        def flush(self) -> None:
            super().flush()
            seconds[:] = self.host_seconds[20:]

    session.Loop = Recorded  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        cfg.build().run(Path(folder) / "run")
    milliseconds = sorted(1e3 * second for second in seconds)
    figures = {
        "host_ms_p50": round(statistics.median(milliseconds), 3),
        "host_ms_p90": round(milliseconds[int(0.9 * len(milliseconds))], 3),
        "steps": steps,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
