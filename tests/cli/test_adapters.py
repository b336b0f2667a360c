"""`axcore generate --adapter`."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.train import save_model
from axcore.train.data import ByteTokenizer

RANK = 3


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """A model, and the same model with LoRA whose adapters change it."""
    random, made = np.random.default_rng(0), tmp_path_factory.mktemp("models")
    adapted = ax.use("lora", rank=RANK)(tiny).model
    params, state = abstract(adapted)[1:]
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape, scale=0.5).astype(leaf.dtype), params)
    tokenizer = ByteTokenizer.Config()
    save_model(made / "adapted", adapted, params, state, tokenizer=tokenizer)
    base = jax.tree.map_with_path(lambda path, _: _at(params, path), abstract(tiny.model)[1])
    save_model(made / "base", tiny.model, base, abstract(tiny.model)[2], tokenizer=tokenizer)
    return made


def _at(tree, path):
    for key in path:
        tree = tree[key.key]
    return tree


@pytest.mark.long
def test_the_output_is_that_of_the_model_with_its_own_adapters(axcore, folders):
    def generated(model, *flags):
        done = axcore("generate", folders / model, "--prompt", "banana ora", "--tokens", "12", *flags)
        assert (done.code, done.err) == (0, "")
        return done.out

    adapter = ("--adapter", f"fruit={folders / 'adapted'}")
    assert generated("base", *adapter) == generated("adapted") != generated("base")
    assert generated("base", *adapter, "--speculation", "ngram") == generated("adapted")
    too_small = axcore(
        "generate", folders / "base", "--prompt", "b", *adapter, "--adapters", f"lora:max_rank={RANK - 1}"
    )
    assert f"rank {RANK}" in too_small.message and "while loading the adapter 'fruit'" in too_small.message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--adapter sql", "--adapter sql: must have the form NAME=FOLDER, such as sql=runs/sql"),
        ("--adapter a=x --adapter a=y", "--adapter a=y: another --adapter has the name 'a'. Choose names that differ"),
        ("--adapter a=x --adapter b=y", "--adapter: an output has one adapter, not a, b. Give one of them"),
        ("--adapters lora", "--adapters lora has no effect without --adapter. Add one, or omit it"),
        ("--adapter a=x --adapters lara", "no installed plugin offers the adapters 'lara'. Did you mean 'lora'?"),
        ("--adapter a=x --cache none", "--adapter requires a KV cache, but --cache is none. Choose a cache"),
    ],
)
def test_case_flags_that_do_not_fit_fail_before_the_model_is_loaded(axcore, flags, message):
    assert message in axcore("generate", "no-such-model", "--prompt", "p", *flags.split(" ")).message
