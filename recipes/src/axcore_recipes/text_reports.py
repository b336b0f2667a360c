"""Callbacks that report on a finished run: compression baselines, a loss plot and a sample."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from axcore.config import AnyInt, ConfigError, NonNegativeFloat, PositiveInt, Seed
from axcore.infer import generate
from axcore.train import Callback, FinishedRun, JsonlWriter, RunInfo
from axcore.train.data import TextInput
from axcore.train.files import Json, write_text
from axcore_recipes.reports import compression_bits_per_byte, plot_losses


class CompressionReport(Callback):
    """Compresses the validation text with zlib and lzma for comparison."""

    class Config(Callback.Config):
        """No fields of its own."""

    first_process_only = True

    def end(self, run: FinishedRun) -> Mapping[str, Json]:
        return compression_bits_per_byte(run.input.validation_bytes())


class LossPlot(Callback):
    """Writes `loss.png`: the losses against the step, with the results of an earlier `CompressionReport`, if any."""

    class Config(Callback.Config):
        order: AnyInt = 1
        metrics: str = "metrics.jsonl"
        """The file of the run's `JsonlWriter`, inside the run folder."""

    config: Config
    first_process_only = True

    def start(self, run: RunInfo) -> None:
        writers = [each for each in run.cfg.callbacks.values() if isinstance(each, JsonlWriter.Config)]
        if self.config.metrics not in (each.file for each in writers):
            raise ConfigError(f"metrics={self.config.metrics!r} requires a JsonlWriter for that file in callbacks")

    def end(self, run: FinishedRun) -> Mapping[str, Json]:
        baselines = {name: float(v) for name, v in run.summary.items() if name in COMPRESSORS and isinstance(v, float)}
        metrics = run.folder / self.config.metrics
        plot_losses(metrics, run.folder / "loss.png", title=run.folder.name, baselines=baselines)
        return {}


COMPRESSORS = "zlib_bits_per_byte", "lzma_bits_per_byte"


class SampleReport(Callback):
    """Writes `sample.txt`, the model's continuation of a prompt. Skipped in a run of several processes."""

    class Config(Callback.Config):
        order: AnyInt = 1
        prompt: str = "def read_file(path):\n"
        num_tokens: PositiveInt = 400
        temperature: NonNegativeFloat = 0.7
        seed: Seed = 0

    config: Config

    def end(self, run: FinishedRun) -> Mapping[str, Json]:
        if jax.process_count() > 1:
            return {}
        cfg = self.config
        if not isinstance(run.input, TextInput):
            raise ConfigError(f"SampleReport requires a TextInput, got {type(run.input).__name__}")
        tokenizer = run.input.tokenizer
        prompt = [tokenizer.separator_id, *tokenizer.encode(cfg.prompt.encode())]
        ids = generate(
            run.model,
            prompt,
            num_tokens=cfg.num_tokens,
            context=run.cfg.input.seq_len,
            key=jax.random.key(cfg.seed),
            temperature=cfg.temperature,
        )
        text = cfg.prompt + tokenizer.decode(ids).decode(errors="replace")
        write_text(run.folder / "sample.txt", text)
        return {}
