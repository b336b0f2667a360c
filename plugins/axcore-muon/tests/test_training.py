"""Training with Muon: it learns, and its state is saved and restored."""

import random
import shutil

import pytest

import axcore as ax
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.train import JsonlWriter, Learner, Saving, Trainer, WarmupStableDecay
from axcore.train.callbacks.writers import read_jsonl
from axcore.train.data import ByteTokenizer, TextFiles, TextInput

STEPS = 12


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("corpus"), random.Random(0)
    for number in range(20):
        words = (rng.choice(["banana", "orange", "kiwi", "papaya", "lemon"]) for _ in range(60))
        (folder / f"{number:02}.txt").write_text(" ".join(words))
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=2), ffn=FeedForward.Config(hidden_dim=32))
    plain = Trainer.Config(
        model=CausalLM.Config(
            vocab_size=ByteTokenizer.Config().build().vocab_size,
            dim=16,
            decoder=Repeat.Config(num_layers=2, layers=layer),
        ),
        input=TextInput.Config(
            source=TextFiles.Config(folder=str(folder), validation_percent=25.0),
            seq_len=32,
            batch_size=4,
            prefetch_batches=0,
        ),
        learner=Learner.Config(schedule=WarmupStableDecay(peak=0.02, warmup_steps=2)),
        steps=STEPS,
        callbacks={"metrics": JsonlWriter.Config(), "saving": Saving.Config(every_steps=STEPS // 2)},
    )
    return ax.use("muon", steps=3)(plain)


def losses(folder):
    return {line["step"]: line["train/loss"] for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line}


@pytest.mark.long
def test_run_learns_and_resumes_with_the_same_losses(config, tmp_path):
    summary = ax.fit(config, out=tmp_path / "whole")
    whole = losses(tmp_path / "whole")
    assert len(whole) == STEPS
    assert whole[max(whole)] < 0.75 * whole[min(whole)]
    assert "muon" in str(summary["plugins"])
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    last = max((tmp_path / "part" / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    shutil.rmtree(last)
    ax.fit(config, out=tmp_path / "part", resume=True)
    assert losses(tmp_path / "part") == whole
