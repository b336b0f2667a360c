"""Trains the recipe `quickstart` in bfloat16 and with number formats of fewer bits, with the same seed and batches.

Prints a JSON object for each variant: the mean training loss of the last 20 steps, the validation bits per byte, their
ratios to bfloat16, and the seconds of the run. A variant is `bf16`, or a feature with options as in `--use`, such as
`fp8:scaling=delayed` or `fp8:where=model.decoder.layers.**`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import cast

import jax

import axcore as ax
from axcore.nn import CausalLM, Repeat
from axcore.plugin import NumericsOffer, registry
from axcore.plugin.features import use_text
from axcore.train import Trainer
from axcore_recipes.reports import read_series

KEPT = ("evaluation", "metrics")
"""The callbacks that the results are read from."""
LAST = 20


def trainer(variant: str, given: argparse.Namespace) -> Trainer.Config:
    """The recipe with more layers, so that number formats apply to most of them by default."""
    cfg = cast(Trainer.Config, ax.recipe("quickstart"))
    assert isinstance(cfg.model, CausalLM.Config) and isinstance(cfg.model.decoder, Repeat.Config)
    model = cfg.model.set(
        dtypes=ax.DTypes(compute="bfloat16"),
        decoder=cfg.model.decoder.set(num_layers=given.layers, unroll=given.layers),
    )
    callbacks = {name: cfg.callbacks[name] for name in KEPT}
    cfg = cfg.set(model=model, callbacks=callbacks, steps=given.steps, minutes=None, seed=given.seed)
    return cfg if variant == "bf16" else use_text(variant)(cfg)


def results(cfg: Trainer.Config) -> dict[str, float]:
    """Trains, and reads the results from the metrics of the run."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        ax.fit(cfg, out)
        metrics = Path(out) / "metrics.jsonl"
        losses = [value for _, value in read_series(metrics, "train/loss")]
        bits = read_series(metrics, "validation/bits_per_byte")[-1][1]
    figures = {"train_loss": statistics.fmean(losses[-LAST:]), "bits_per_byte": bits}
    return figures | {"losses": len(losses), "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    installed = [name for name in ("int8",) if registry().find(NumericsOffer, name) is not None]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=["fp8", "fp8:scaling=delayed", *installed])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    baseline: dict[str, float] = {}
    for variant in ("bf16", *given.variants):
        found = results(trainer(variant, given))
        baseline = baseline or found
        ratios = {f"{name}_ratio": round(found[name] / baseline[name], 4) for name in ("train_loss", "bits_per_byte")}
        about = {"variant": variant, "steps": given.steps, "layers": given.layers, "card": jax.devices()[0].device_kind}
        print(json.dumps(about | {name: round(value, 4) for name, value in found.items()} | ratios), flush=True)


if __name__ == "__main__":
    main()
