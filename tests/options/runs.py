"""The parts of a run around its step: inputs, callbacks, checkpoints, initial weights. What is observed is what they
return, write and print."""

import contextlib
import hashlib
import io
import itertools
import json
import pathlib
import shutil
import threading
import time
from types import SimpleNamespace

import grain
import jax
import numpy as np

import axcore as ax
import axcore.train.data.rows
import axcore_recipes.text_reports
from axcore.infer import Engine, Grammar, Request, SamplingOptions
from axcore.infer.speculation import MTP, DraftModel, NGram
from axcore.module import abstract, functional
from axcore.nn import FeedForward, LayerNorm, MultiTokenPrediction, Repeat
from axcore.testing.models import tiny_model
from axcore.train import (
    BitsPerByte,
    Callback,
    Checkpointer,
    Evaluation,
    FromRun,
    JsonlWriter,
    Progress,
    Saving,
    TensorBoardWriter,
    ValidationLoss,
    save_model,
)
from axcore.train.callbacks.base import FinishedRun, RunInfo, StepInfo
from axcore.train.callbacks.group import Callbacks
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat
from axcore.train.data import (
    ByteTokenizer,
    ConcatThenSplit,
    FirstFit,
    JsonLines,
    Mixture,
    TextFiles,
    TextInput,
)
from axcore_callbacks.early_stopping import EarlyStopping
from axcore_callbacks.ema import EMA
from axcore_guided.compiler import LLGuidance
from axcore_hf.checkpoint import Checkpoint
from axcore_hf.feature import PublishedTokenizer
from axcore_hf.initial import FromHF
from axcore_hf.tokenizer import HFTokenizer
from axcore_lora import FromAdapter, LoRAAdapters, adapters
from axcore_moe.dead_experts import DeadExpertWarning
from axcore_moe.upcycling import Upcycled
from axcore_paged_kv.cache import PagedCache
from axcore_recipes.corpus import StandardLibrary
from axcore_recipes.text_reports import CompressionReport, LossPlot, SampleReport
from axcore_rope.learned import LearnedPositions

from .effects import Host
from .layers import layer, model, moe
from .steps import trainer

PUBLISHED = pathlib.Path(__file__).parents[2] / "plugins/axcore-hf/tests/parity/recorded/llama"
SAVE_SECONDS = 2.0
"""Time for which a commit waits for the return of `save`, which returns at once unless it waits for the commit."""
WORDS = {f"w{number}": number for number in range(9)} | {"<end>": 9}
TOKENIZER = {
    "version": "1.0",
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "w0"},
}


def hosts(folder, patch):
    """The hosts.

    Args:
        folder: an empty folder.
        patch: a pytest.MonkeyPatch, for clocks and for what only changes the speed.
    """
    corpus(folder)
    yield from inputs(folder, patch)
    yield from callbacks(folder, patch)
    yield Host(Checkpointer.Config(keep_every=2), saved(folder, patch))
    yield from initials(folder)
    paged = Engine.Config(cache=PagedCache.Config(page_size=2), max_rows=2, max_len=8, step_tokens=4)
    yield Host(paged, served())
    yield Host(NGram.Config(num_speculative_tokens=2, prompt_lookup_max=3), continued)
    small = Engine.Config(max_rows=2, max_len=12, step_tokens=4)
    predicting = tiny_model().set(future=(MultiTokenPrediction.Config(layer=tiny_model().decoder.layers),))
    for drafter in (DraftModel.Config(num_speculative_tokens=2), MTP.Config(num_speculative_tokens=2)):
        draft_model = tiny_model() if isinstance(drafter, DraftModel.Config) else None
        yield Host(small.set(speculation=drafter), served(predicting, draft_model), at="speculation")
    yield Host(Engine.Config(max_rows=2, max_len=32, grammars=LLGuidance.Config()), guided(), at="grammars")
    room = LoRAAdapters.Config(max_adapters=2, max_rank=2, where=("decoder.**",), exclude=("**.down",))
    yield Host(room, lambda cfg: room_for_adapters(cfg.build()))
    fields = ("input", "steps", "minutes", "initial", "seed", "checkpointer", "callbacks")
    yield Host(trainer(**run_fields(folder)), trained(folder), fields=fields)


def continued(cfg):
    """The drafts for tokens whose last one, two and three occurred before."""
    row = [1, 2, 3, 4, 5, 7, 3, 4, 6, 9, 4, 2, 3, 4]
    return [NGram(cfg, None).continuation(row[start:]) for start in (0, 1, 3, 8)]


def room_for_adapters(adapters):
    """The shapes of the adapters of a small model."""
    return str(abstract(adapters.attach(tiny_model()))[2])


def served(model=None, draft_model=None):
    """Two requests with a common prefix and a short one, one after another."""
    built = (tiny_model() if model is None else model).build(rngs=ax.Rngs(0))
    smaller = None if draft_model is None else draft_model.build(rngs=ax.Rngs(1))
    prompts = (1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (7,)
    asked = [Request(ids, SamplingOptions(temperature=0.0)) for ids in prompts]

    def observe(cfg):
        with cfg.build(built, draft_model=smaller) as engine:
            return [engine.generate([request]) for request in asked], engine.stats

    return observe


def guided():
    """A text that follows a JSON schema."""
    tokenizer = ByteTokenizer.Config().build()
    built = tiny_model().set(vocab_size=tokenizer.vocab_size).build(rngs=ax.Rngs(0))
    grammar = Grammar.json_schema({"const": [1, 2]})

    def observe(cfg):
        with cfg.build(built, tokenizer, eos_ids=tokenizer.eos_ids) as engine:
            return engine.generate([engine.request("a", SamplingOptions(temperature=0.0, grammar=grammar))])

    return observe


def corpus(folder):
    """Texts, JSON lines, a tokenizer and a published model."""
    texts = folder / "texts"
    (texts / "inner").mkdir(parents=True)
    words = np.random.default_rng(0).integers(0, 9, (30, 40))
    lines = [" ".join(f"w{number}" for number in row) + "\n" for row in words]
    for number, line in enumerate(lines):
        (texts / f"{number}.txt").write_text(line)
    (texts / "inner" / "last.txt").write_text(lines[0])  # a duplicate
    (texts / "long.txt").write_text("".join(lines[:4]))
    (texts / "absent.txt").symlink_to(folder / "nowhere")
    (texts / "site-packages").mkdir()
    (texts / "site-packages" / "package.txt").write_text(lines[1][3:])
    for number in range(4):
        (texts / f"{number}.md").write_text(lines[number][5:])
    (folder / "lines.jsonl").write_text(
        "".join(f"{json.dumps({'text': line, 'other': line[::-1]})}\n" for line in lines)
    )
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    shutil.copytree(PUBLISHED, folder / "published", ignore=shutil.ignore_patterns("gradients", "*.npz"))
    shutil.copy(folder / "tokenizer.json", folder / "published")


def text_files(folder, cls=TextFiles.Config, **fields):
    return cls(folder=str(folder / "texts"), validation_percent=20.0, allow_unreadable=True, **fields)


def tree(folder):
    """The files below a folder, with digests of their contents."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def inputs(folder, patch):
    speed = []

    def recorded(original, position):
        """Records one argument, which does not change the batches."""

        def call(*args, **kwargs):
            speed.append((*args, *kwargs.values())[position])
            return original(*args, **kwargs)

        return call

    for where, name, position in ((grain, "ReadOptions", 0), (axcore.train.data.rows, "JoinedBatches", 2)):
        patch.setattr(where, name, recorded(getattr(where, name), position))

    def read(cfg):
        speed.clear()
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            made = cfg.build()
            train = made.train_batches()
            found = [*itertools.islice(train, 50), *made.validation_batches()]
            train.close()
        arrays = [[(name, each.shape, each.tobytes()) for name, each in batch.items()] for batch in found]
        return arrays, made.vocab_size, printed.getvalue(), list(speed)

    texts = text_files(folder, exclude=("inner",))
    given = {"seq_len": 8, "batch_size": 4, "prefetch_batches": 2, "source": texts}
    yield Host(TextInput.Config(**given, seed=3, packing=FirstFit.Config()), read)
    yield Host(TextInput.Config(**given, packing=ConcatThenSplit.Config()), read)
    lines = JsonLines.Config(file=str(folder / "lines.jsonl"), validation_percent=20.0)
    mixed = Mixture.Config(sources={"a": texts, "b": lines}, weights={"a": 1.0, "b": 2.0})
    yield Host(TextInput.Config(**given | {"source": mixed}), read)
    library = text_files(folder, StandardLibrary.Config, patterns=("**/*.txt",))
    tokenizer = HFTokenizer.Config(file=str(folder / "tokenizer.json"), eos_ids=(9,))
    yield Host(TextInput.Config(**given | {"source": library}, tokenizer=tokenizer), read)
    published = PublishedTokenizer.Config(source=f"hf:{folder / 'published'}", eos_ids=(9,))
    yield Host(TextInput.Config(**given, tokenizer=published), read, at="tokenizer")


class Other(Callback):
    """Another callback of the run."""

    class Config(Callback.Config):
        pass


def callbacks(folder, patch):
    asked = []

    def ask(*args, **kwargs):
        asked.append(str((args[1:], sorted(kwargs.items()))))
        return []

    patch.setattr(axcore_recipes.text_reports, "generate", ask)
    patch.setattr(axcore_recipes.text_reports, "plot_losses", ask)
    source = text_files(folder)
    data = TextInput.Config(source=source, seq_len=8, batch_size=4).build()

    def events(cfg):
        """Calls a callback as a run of four steps does, with a clock that advances by 20 s each time it is read."""
        clock = itertools.count(0.0, 20.0)
        out, found, called = folder / "run", [], []
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        asked.clear()

        def checkpoint(callback, step):
            called.append(callback.config.target.__name__)
            if type(callback) is cfg.target:
                raise RuntimeError("failed on purpose")

        with patch.context() as patched, contextlib.redirect_stderr(io.StringIO()):
            for name in ("time", "monotonic"):
                patched.setattr(time, name, lambda: next(clock))
            patched.setattr(time, "time_ns", lambda: int(next(clock)))
            group = Callbacks({"m": cfg, "k": Other.Config(), "n": Other.Config(order=1)})
            of_run = trainer(callbacks={"metrics": JsonlWriter.Config()})
            program = SimpleNamespace(state=SimpleNamespace(callbacks={"average": {"params": {}}}))
            found.append(group.start(RunInfo(of_run, out, data, program, step=0, total_steps=4, resumed=False)))
            for step, loss in enumerate((1.0, 0.9, 0.8, 0.95), 1):
                found.append(group.due(step))
                found.append(group.step(StepInfo(step, {"loss": loss, "ffn.dead_experts": 1.0}, total_steps=4)))
                found.append(group.evaluation(step, {"validation/loss": loss}))
                found.append(tree(out))
            found.append(group.end(FinishedRun(of_run, out, None, data, {})))
            failure = str(group.failure)
            for cls in (cfg.target, Other):
                patched.setattr(cls, "checkpoint", checkpoint)
            group.checkpoint(4)
            group.close()
        return found, failure, called, group.failure is None, sorted(tree(out)), asked[:]

    kept = {"validation": BitsPerByte.Config(weights="average"), "loss": ValidationLoss.Config(weights="average")}
    for cfg in (
        CompressionReport.Config(),
        EarlyStopping.Config(patience=1),
        EMA.Config(),
        Evaluation.Config(every_steps=2, evaluators=kept),
        JsonlWriter.Config(),
        LossPlot.Config(),
        Progress.Config(),
        SampleReport.Config(),
        Saving.Config(every_steps=3, every_minutes=1.0),
        DeadExpertWarning.Config(),
        TensorBoardWriter.Config(),
    ):
        yield Host(cfg, events)


def saved(folder, patch):
    def observe(cfg):
        shutil.rmtree(folder / "saved", ignore_errors=True)
        returned, is_early = threading.Event(), []
        with cfg.build(folder / "saved") as checkpointer:
            commit = checkpointer._storage.wait

            def wait():
                is_early.append(returned.wait(SAVE_SECONDS))
                commit()

            for step in range(1, 6):
                with patch.context() as patched:
                    if step == 5:
                        patched.setattr(checkpointer._storage, "wait", wait)
                    checkpointer.save(step, {"x": np.zeros(1)}, data={}, meta={})
                    returned.set()
                    checkpointer.wait()
                    returned.clear()
        return checkpointer.steps(), is_early

    return observe


def initials(folder):
    def weights(name, cfg):
        _, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
        return str(save_model(folder / name, cfg, params, state))

    def arrays(target):
        def observe(cfg):
            _, params, state = abstract(target)
            found = initial_arrays(cfg, target, flat(params), flat(state), seed=0)
            return {path: np.asarray(each).tobytes() for path, each in found.items()}

        return observe

    dense = model(decoder=Repeat.Config(num_layers=1, layers=layer(input_dim=ax.REQUIRED)))
    more = weights("more", dense.set(position=LearnedPositions.Config(max_len=4)))
    fewer = dense.set(norm=LayerNorm.Config())
    yield Host(FromRun.Config(folder=more, drop=("position.**",), allow_new=("norm.**",)), arrays(fewer))
    mixture = ax.select(dense, FeedForward).swap(moe(input_dim=ax.REQUIRED), drop=("hidden_dim",))
    source = FromRun.Config(folder=weights("dense", dense))
    yield Host(Upcycled.Config(source=source, noise=0.1), arrays(mixture))
    adapted = ax.use("lora", rank=2)(fewer)
    of_adapter = adapters(abstract(adapted)[1])
    save_model(folder / "adapter", adapted, jax.tree.map(lambda form: np.full(form.shape, 0.5, form.dtype), of_adapter))
    base = FromRun.Config(folder=more, drop=("position.**",))
    cfg = FromAdapter.Config(base=base, folder=str(folder / "adapter"), allow_new=("norm.**",))
    yield Host(cfg, arrays(adapted))
    published = f"hf:{folder / 'published'}"
    target = Checkpoint.open(published).model.set(norm=LayerNorm.Config())
    yield Host(FromHF.Config(source=published, allow_new=("norm.**",)), arrays(target))


def run_fields(folder):
    source = text_files(folder)
    text = TextInput.Config(source=source, seq_len=8, batch_size=4, prefetch_batches=0)
    saving = {"saving": Saving.Config(every_steps=1), "metrics": JsonlWriter.Config()}
    small = model(vocab_size=264, decoder=layer(input_dim=ax.REQUIRED))
    return {"input": text, "model": small, "steps": 4, "callbacks": saving}


def trained(folder):
    def observe(cfg):
        out = folder / "trained"
        shutil.rmtree(out, ignore_errors=True)
        with contextlib.redirect_stderr(io.StringIO()):
            ax.fit(cfg, out)
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses = [{name: each[name] for name in ("step", "train/loss") if name in each} for each in metrics]
        return losses, sorted(path.name for path in (out / "checkpoints").iterdir())

    return observe
