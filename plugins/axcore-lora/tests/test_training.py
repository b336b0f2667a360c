"""Training with adapters: they learn, and all other parameters stay bit-identical."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.config import AxcoreError
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.testing.models import by_path
from axcore.train import Checkpointer, Learner, Trainer, WarmupStableDecay
from axcore.train.callbacks.writers import JsonlWriter, read_jsonl
from axcore.train.data import ByteTokenizer, TextFiles, TextInput
from axcore_lora import adapters

pytestmark = pytest.mark.long

STEPS = 12
LORA = ax.use("lora", rank=4, dora=True)


@pytest.fixture
def plain(tmp_path):
    folder, rng = tmp_path / "corpus", random.Random(0)
    folder.mkdir()
    for number in range(20):
        words = (rng.choice(["banana", "orange", "kiwi", "papaya", "lemon"]) for _ in range(60))
        (folder / f"{number:02}.txt").write_text(" ".join(words))
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=2), ffn=FeedForward.Config(hidden_dim=32))
    return Trainer.Config(
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
        learner=Learner.Config(schedule=WarmupStableDecay(peak=0.05, warmup_steps=2)),
        steps=STEPS,
        callbacks={"metrics": JsonlWriter.Config()},
    )


@pytest.fixture
def config(plain):
    return ax.pipe(plain, LORA)


def losses(folder):
    return {line["step"]: line["train/loss"] for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line}


@pytest.mark.slow
def test_adapters_learn_and_the_base_is_bit_identical(config, tmp_path):
    program = config.build().program()
    before = by_path(jax.device_get(program.init(jnp.uint32(config.seed)).params))
    summary = ax.fit(config, out=tmp_path / "run")
    assert "lora" in summary["plugins"]
    found = losses(tmp_path / "run")
    assert len(found) == STEPS
    assert found[max(found)] < found[min(found)] - 0.2

    with Checkpointer.Config().build(tmp_path / "run" / "checkpoints") as checkpointer:
        state = checkpointer.restore(program.state).state
        alone = checkpointer.restore({"params": adapters(program.state.params)}, subset=True).state["params"]
    after = by_path(jax.device_get(state.params))
    assert before.keys() == after.keys()
    moved = {path for path, leaf in before.items() if leaf.tobytes() != after[path].tobytes()}
    assert moved == {path for path in before if ".adapter." in path} != set()
    held = {path for path, leaf in by_path(state.optimizer).items() if leaf.ndim}
    assert held and all(".adapter." in path for path in held)  # no moments of frozen parameters
    for path, leaf in by_path(alone).items():
        np.testing.assert_array_equal(leaf, after[path])


@pytest.mark.slow
def test_adapters_train_on_the_weights_of_another_run(plain, tmp_path):
    ax.fit(plain.set(steps=3), out=tmp_path / "base")
    start = ax.use("run-weights", folder=str(tmp_path / "base"), allow_new=("**.adapter.**",))
    tuned = ax.pipe(plain.set(steps=3), LORA, start)
    ax.fit(tuned, out=tmp_path / "tuned")
    base, after = (params_of(cfg, tmp_path / name) for cfg, name in ((plain, "base"), (tuned, "tuned")))
    assert base.keys() == {path for path in after if ".adapter." not in path} != after.keys()
    for path, leaf in base.items():
        np.testing.assert_array_equal(after[path], leaf)
    with pytest.raises(AxcoreError, match=r"(?s)adapter\.a: missing\n.*initial\.allow_new: \*\*\.adapter\.\*\*"):
        ax.fit(ax.override(tuned, ["initial.allow_new=()"]), out=tmp_path / "refused")


def params_of(cfg, folder):
    with Checkpointer.Config().build(folder / "checkpoints") as checkpointer:
        wanted = {"params": cfg.build().program().state.params}
        return by_path(checkpointer.restore(wanted, subset=True).state["params"])
