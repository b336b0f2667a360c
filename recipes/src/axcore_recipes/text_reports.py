"""End-of-run reports of a text model: compressors beside it, a loss plot, a sample."""

from __future__ import annotations

from typing import Any

import jax

from axcore.infer import generate
from axcore.train import FinishedRun, Report
from axcore.train.files import write_text
from axcore_recipes.reports import compression_bits_per_byte, plot_losses


class CompressionReport(Report):
    """What zlib and lzma reach on the bytes that the model was evaluated on."""

    def __call__(self, run: FinishedRun) -> dict[str, Any]:
        return compression_bits_per_byte(run.input.validation_bytes())


class LossPlot(Report):
    """`loss.png`: losses over the steps, with what compressors reach where a `CompressionReport` came before."""

    def __call__(self, run: FinishedRun) -> dict[str, Any]:
        compressors = "zlib_bits_per_byte", "lzma_bits_per_byte"
        baselines: dict[str, float] = {name: run.summary[name] for name in compressors if name in run.summary}
        plot_losses(run.folder / "metrics.jsonl", run.folder / "loss.png", title=run.folder.name, baselines=baselines)
        return {}


class SampleReport(Report):
    """`sample.txt`: text that the model goes on with after a prompt."""

    class Config(Report.Config):
        prompt: str = "def read_file(path):\n"
        num_tokens: int = 400
        temperature: float = 0.7
        seed: int = 0

    def __call__(self, run: FinishedRun) -> dict[str, Any]:
        cfg = self.config
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
