"""`axcore generate`."""

import contextlib
import io
import re

import jax
import numpy as np
import pytest

import axcore as ax
from axcore import infer
from axcore.cli import main
from axcore.infer import Generator, generate
from axcore.module import abstract
from axcore.nn import ContiguousCache
from axcore.testing.devices import on_devices
from axcore.train import Checkpointer, save_model
from axcore.train.data import ByteTokenizer

pytestmark = pytest.mark.long

PROMPT = "banana ora"


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """The run folder of a trained model."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    ax.fit(tiny.set(steps=30, callbacks={}), out=folder)
    return folder


@pytest.fixture(scope="module")
def model(tiny, trained):
    """The model of the last checkpoint of `trained`."""
    with Checkpointer.Config().build(trained / "checkpoints") as checkpointer:
        state = checkpointer.restore(tiny.build().program().state).state
    return abstract(tiny.model)[0].bind(state.params, state.model_state)


def expected(model, prompt, **arguments):
    ids = [256, *prompt.encode()]
    defaults = {"num_tokens": 9, "context": 32, "key": jax.random.key(0), "temperature": 0.0, "eos_ids": [256]}
    found = generate(model, ids, **{**defaults, **arguments})
    return prompt + bytes(found[found < 256].tolist()).decode(errors="replace") + "\n"


def test_a_run_folder_generates_like_the_model_without_a_cache(axcore, trained, model):
    for prompt in (PROMPT, ""):
        done = axcore("generate", trained, "--prompt", prompt, "--tokens", "9")
        assert (done.code, done.err) == (0, "")
        assert done.out == expected(model, prompt)


def test_invalid_utf8_in_the_prompt_is_replaced(axcore, trained):
    done = axcore("generate", trained, "--prompt", "ab\udcff", "--tokens", "1")
    assert done.code == 0 and done.out.startswith("ab\ufffd"), done


def test_a_recipe_provides_its_weights(axcore, trained, corpus, model):
    use = ("--set", f"input.source.folder={corpus}", "--use", "rope", "--use", f"run-weights:folder={trained}")
    done = axcore("generate", "tiny", *use, "--prompt", PROMPT, "--tokens", "9")
    assert done.out == expected(model, PROMPT), done


def printed(arguments):
    """The exit code and the output of a command in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return main(arguments), out.getvalue()


@pytest.mark.parametrize("mesh", ["tensor=2", pytest.param("fsdp=2,tensor=2", marks=pytest.mark.slow)])
def test_a_model_on_several_devices_generates_the_same_text(trained, model, mesh):
    arguments = ["generate", str(trained), "--prompt", PROMPT, "--tokens", "9", "--mesh", mesh]
    assert on_devices(printed, arguments) == (0, expected(model, PROMPT))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tensor", r"--mesh tensor: 'tensor' is not AXIS=SIZE with a new axis of data, fsdp, expert, tensor"),
        ("tensr=2", r"'tensr=2' is not AXIS=SIZE"),
        ("tensor=0", r"'tensor=0' is not AXIS=SIZE"),
        ("tensor=2,tensor=2", r"'tensor=2' is not AXIS=SIZE with a new axis"),
        ("tensor=4096", r"--mesh tensor=4096 requires 4096 devices, but there are \d+ \(cpu\)\. Set the environment"),
        ("tensor=1 --cache none", r"--mesh shards KV caches, but --cache is none"),
    ],
)
def test_a_mesh_that_cannot_be_made_raises(axcore, trained, mesh, message):
    done = axcore("generate", trained, "--prompt", PROMPT, "--mesh", *mesh.split(" "))
    assert re.search(message, done.message)


def test_case_the_cache_is_chosen_on_the_command_line(axcore, trained, model, monkeypatch):
    given = []

    def generator(*args, cache, **rest):
        given.append(cache)
        return Generator(*args, **rest)

    monkeypatch.setattr(infer, "Generator", generator)
    for cache in ("none", "contiguous:value_dim=4"):
        done = axcore("generate", trained, "--prompt", PROMPT, "--tokens", "9", "--cache", cache)
        assert done.out == expected(model, PROMPT), done
    assert given == [None, ContiguousCache.Config(value_dim=4)]


def test_case_the_cache_of_a_model_gives_way_to_the_chosen_one(axcore, tiny, tmp_path, monkeypatch):
    own = saved(tmp_path / "own", ax.use("contiguous", value_dim=4)(tiny.model), ByteTokenizer.Config())
    held = []

    def generator(model, **_):
        held.append(model.config)
        return lambda *_, **__: np.zeros(0)

    monkeypatch.setattr(infer, "Generator", generator)
    for cache in ((), ("--cache", "contiguous")):
        assert axcore("generate", own, "--prompt", "a", *cache).code == 0
    assert held == [ax.use("contiguous", value_dim=4)(tiny.model), tiny.model]


@pytest.mark.slow
def test_the_seed_determines_the_sampled_tokens(axcore, trained, model):
    drawn = [
        axcore("generate", trained, "--prompt", PROMPT, "--tokens", 9, "--temperature", 1.5, "--seed", seed).out
        for seed in (1, 2)
    ]
    assert drawn[0] != drawn[1] == expected(model, PROMPT, temperature=1.5, key=jax.random.key(2))


def test_case_dtype_is_applied_and_checked(axcore, trained):
    done = axcore("generate", trained, "--prompt", PROMPT, "--tokens", 3, "--dtype", "bfloat16")
    assert done.code == 0 and done.out.startswith(PROMPT)
    assert "'b16' is not a dtype" in axcore("generate", trained, "--prompt", "a", "--dtype", "b16").message
    for dtype in ("int8", "complex64"):
        message = f"DTypes.param must be a floating-point dtype such as 'bfloat16', not {dtype}"
        assert message in axcore("generate", trained, "--prompt", "a", "--dtype", dtype).message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tiny"], r"the recipe 'tiny' has no weights. Pass the folder of a trained run (axcore train tiny)"),
        (["tinny"], "'tinny' is not a model folder and cannot be composed as a recipe: there is no recipe 'tinny'"),
        ([""], "'' is not a model folder and cannot be composed as a recipe: there is no recipe ''"),
        (["./tiny"], "/tiny is not a model folder: config.json: No such file or directory"),
        (
            ["RUN", "--set", "steps=3"],
            ": --set steps=3 would edit a recipe, but the model in a folder is used as it is. Omit it.",
        ),
        (["RUN", "--use", "contiguous:max_len=9"], "used as it is. To choose a KV cache: --cache contiguous:max_len=9"),
        (["RUN", "--cache", "contigous"], "no installed plugin offers the kv cache 'contigous'. Did you mean"),
        (["RUN", "--cache", "contiguous:max_len=x"], "option 'max_len' of contiguous"),
        (["RUN", "--cache", "contiguous:size=8"], "ContiguousCache has no field 'size'"),
        (
            ["RUN", "--cache", "contiguous:value_dim=3"],
            "attention.cache: value_dim=3 is set on axcore.nn.ContiguousCache",
        ),
        (["RUN", "--cache", "contiguous:max_len=9"], "max_len=9 is set on axcore.nn.ContiguousCache"),
        (["RUN", "--tokens", "0"], "--tokens must be from 1 to 2**31 - 1, not 0"),
        (["RUN", "--tokens", "1000000000000"], "--tokens must be from 1 to 2**31 - 1"),
        (["RUN", "--tokens", "2000000000"], "a cache of 2000000002 tokens: an array or a program requires"),
        (["RUN", "--tokens", "2000000000"], "Reduce --tokens 2000000000 (RESOURCE_EXHAUSTED: Out of memory"),
        (["RUN", "--seed", "-1"], "--seed must be from 0"),
        (["RUN", "--temperature", "-1"], "temperature must be 0 or more, not -1.0"),
        (["RUN", "--temperature", "nan"], "temperature must be 0 or more, not nan"),
        (["tiny", "--use", "run-weights:folder=nowhere"], "/nowhere is not a model folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_case_invalid_arguments_fail_with_a_message(axcore, trained, argv, message):
    argv = [str(trained) if each == "RUN" else each for each in argv]
    assert message in axcore("generate", *argv, "--prompt", "a").message


def test_more_tokens_than_the_models_max_len_fail(axcore, tiny, tmp_path):
    cfg = ax.pipe(tiny.model, ax.use("learned-positions", max_len=8))
    folder = saved(tmp_path / "short", cfg, ByteTokenizer.Config())
    message = axcore("generate", folder, "--prompt", "abcd", "--tokens", "4").message
    assert "the row has 9 tokens, but max_len=8" in message


def saved(folder, cfg, tokenizer):
    params, state = abstract(cfg)[1:]
    filled = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.1, leaf.dtype), (params, state))
    return save_model(folder, cfg, *filled, tokenizer=tokenizer)


def test_a_missing_tokenizer_and_a_too_small_vocabulary_fail(axcore, tiny, tmp_path):
    cfg = tiny.model.set(vocab_size=260)
    for name, tokenizer, message in (
        ("none", None, "the model has no tokenizer"),
        ("small", ByteTokenizer.Config(), "the tokenizer has 264 ids, but model.vocab_size=260"),
    ):
        folder = saved(tmp_path / name, cfg, tokenizer)
        assert message in axcore("generate", folder, "--prompt", "a").message
