"""From a training run with LoRA to a server that answers with its adapter."""

import re
import subprocess
import sys

import openai
import pytest

import axcore as ax
from axcore.infer import Engine, SamplingOptions
from axcore.infer.loading import load_engine
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.train import Learner, Trainer, WarmupStableDecay
from axcore.train.data import ByteTokenizer, TextFiles, TextInput
from axcore_lora import LoRAAdapters
from axcore_lora.commands import adapter, merge

pytestmark = pytest.mark.slow
GREEDY = SamplingOptions(temperature=0.0, max_tokens=12)


def trainer(folder, steps):
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=2), ffn=FeedForward.Config(hidden_dim=32))
    return Trainer.Config(
        model=ax.pipe(
            CausalLM.Config(
                vocab_size=ByteTokenizer.Config().build().vocab_size,
                dim=16,
                decoder=Repeat.Config(num_layers=2, layers=layer),
            ),
            ax.use("rope"),
        ),
        input=TextInput.Config(
            source=TextFiles.Config(folder=str(folder), validation_percent=25.0),
            seq_len=32,
            batch_size=4,
            prefetch_batches=0,
        ),
        learner=Learner.Config(schedule=WarmupStableDecay(peak=0.05, warmup_steps=2)),
        steps=steps,
    )


def test_train_then_serve(tmp_path):
    corpora = {name: tmp_path / name for name in ("base-text", "fruit-text")}
    for folder, word in zip(corpora.values(), ("hello ", "kiwi "), strict=True):
        folder.mkdir()
        for number in range(8):
            (folder / f"{number}.txt").write_text(word * 60)
    base, tuned, only, merged = (tmp_path / name for name in ("base", "tuned", "only", "merged"))
    ax.fit(trainer(corpora["base-text"], 20), out=base)
    start = ax.use("run-weights", folder=str(base), allow_new=("**.adapter.**",))
    ax.fit(ax.pipe(trainer(corpora["fruit-text"], 40), ax.use("lora", rank=4), start), out=tuned)
    assert adapter([str(tuned), str(only)]) == merge([str(tuned), str(merged)]) == 0

    expected = {}
    for name, folder in (("base", base), ("fruit", merged)):
        with load_engine(folder, Engine.Config(max_len=64)) as engine:
            expected[name] = engine.generate([engine.request("a ", GREEDY)])[0].text
    assert expected["base"] != expected["fruit"]
    with load_engine(base, Engine.Config(max_len=64, adapters=LoRAAdapters.Config(max_rank=4))) as engine:
        for name, folder in (("run", tuned), ("folder", only)):
            engine.load_adapter(name, folder)
        names = (None, "run", "folder")
        found = [
            piece.text for piece in engine.generate([engine.request("a ", GREEDY, adapter=name) for name in names])
        ]
    assert found == [expected[name] for name in ("base", "fruit", "fruit")]

    flags = ["--port", "0", "--max-len", "64", "--max-rows", "2", "--no-warm-up"]
    room = ["--adapter", f"fruit={only}", "--adapter", f"run={tuned}", "--adapters", "lora:max_adapters=2,max_rank=4"]
    command = [sys.executable, "-m", "axcore", "serve", base, *flags, *room]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stderr if line.startswith("serving "))
        address = re.fullmatch(r"serving base at (http://127\.0\.0\.1:\d+/v1)\n", line)[1]
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=120) as client:
            assert [model.id for model in client.models.list()] == ["base", "fruit", "run"]
            for name, text in (("base", "base"), ("fruit", "fruit"), ("run", "fruit")):
                answer = client.completions.create(model=name, prompt="a ", temperature=0, max_tokens=12)
                assert answer.choices[0].text == expected[text]
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="sql", prompt="a ")
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
