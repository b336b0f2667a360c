"""Sampling against a loop that calls the model on the full window, and against softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.config import AxcoreError
from axcore.infer import Engine, Generator, Request, SamplingOptions, generate
from axcore.nn import (
    Attention,
    CausalLM,
    ContiguousCache,
    FanIn,
    FeedForward,
    Linear,
    Normal,
    Repeat,
    TransformerLayer,
)

VOCAB = 11


@pytest.fixture(scope="module")
def model():
    """Two layers with RoPE, with weights so large that the next token depends on all earlier tokens."""
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=2), ffn=FeedForward.Config(hidden_dim=32))
    cfg = CausalLM.Config(vocab_size=VOCAB, dim=16, decoder=Repeat.Config(num_layers=2, layers=layer))
    cfg = ax.pipe(cfg, ax.use("rope"))
    cfg = ax.select(cfg, "embedding").set(init=Normal(stddev=1.0))
    cfg = ax.select(cfg, Attention).set(value=Linear.Config(init=FanIn(scale=9.0)))
    return cfg.build(rngs=ax.Rngs(0))


@pytest.fixture(scope="module")
def logits_of(model):
    """The logits of the token after `ids`, from a call with exactly these ids."""

    @jax.jit
    def call(ids):
        (logits, _), _ = fn(params, state, ids[None])
        return logits[0]

    fn, params, state = ax.functional(model)
    return lambda ids: np.asarray(call(jnp.asarray(ids, jnp.int32)), np.float64)


@pytest.fixture(scope="module")
def generator(model):
    """Builds a `Generator` from its arguments. Equal arguments return the same one."""
    return functools.cache(functools.partial(Generator, model))


def naive_greedy(logits_of, row, prompt_len, context):
    """The likeliest token after each window of `context` tokens, from the end of the prompt on."""
    first = logits_of(row[:context])  # serves every window that starts at the start of the row
    after = [first[end - 1] if end <= context else logits_of(row[end - context : end])[-1] for end in range(len(row))]
    return [int(np.argmax(logits)) for logits in after[prompt_len:]]


KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("prompt_len", "num_tokens", "context"),
    [(1, 12, 8), (3, 5, 8), (8, 6, 8), (13, 6, 8), (3, 2, 16), (4, 4, 1), (5, 1, 8)],
    ids=["one token", "within", "just full", "longer than the context", "much room", "context of one", "one more"],
)
def test_greedy_sampling_equals_a_loop_over_full_windows(generator, logits_of, prompt_len, num_tokens, context):
    prompt = np.random.default_rng(prompt_len).integers(0, VOCAB, prompt_len)
    found = generator(context=context, temperature=0)(prompt, num_tokens=num_tokens, key=KEY)
    assert (found.dtype, found.size) == (np.int32, num_tokens)
    assert found.tolist() == naive_greedy(logits_of, [*prompt, *found], prompt_len, context)


def test_the_next_token_depends_on_the_whole_window(logits_of):
    """Checks that the test above can detect a wrong window."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, VOCAB, 8) for _ in range(40)]
    for shorter in (7, 1):
        changed = [np.argmax(logits_of(row)[-1]) != np.argmax(logits_of(row[-shorter:])[-1]) for row in rows]
        assert sum(changed) > 4


def test_the_prompt_may_be_any_integer_sequence_and_is_not_changed(model):
    prompt = np.array([3, 1, 4], np.uint8)
    kept = prompt.copy()
    first = generate(model, prompt, num_tokens=4, context=8, key=KEY, temperature=0)
    assert first.tolist() == generate(model, [3, 1, 4], num_tokens=4, context=8, key=KEY, temperature=0).tolist()
    assert (prompt == kept).all()


def test_the_sample_depends_on_the_key(generator):
    sample = lambda seed: generator(context=8)([1, 2], num_tokens=40, key=jax.random.key(seed)).tolist()  # noqa: E731
    assert sample(1) == sample(1) != sample(2)
    assert all(0 <= token < VOCAB for token in sample(3))


def test_a_longer_sample_begins_with_the_shorter_one(generator):
    few, many = (generator(context=8)([1, 2], num_tokens=n, key=KEY).tolist() for n in (6, 20))
    assert many[:6] == few


def test_a_cache_does_not_change_the_sample(generator):
    for seed in (1, 2):
        given = {"prompt": [3, 1, 4], "num_tokens": 9, "key": jax.random.key(seed)}
        without = generator(context=16, temperature=1.5)(**given)
        cached = generator(context=16, temperature=1.5, cache=ContiguousCache.Config())(**given)
        assert without.tolist() == cached.tolist()


def test_the_sample_of_a_key_is_that_of_an_engine_with_its_seed(generator, model):
    given = {"prompt": [3, 1, 4], "num_tokens": 9, "key": jax.random.key(2)}
    found = generator(context=16, temperature=1.5, cache=ContiguousCache.Config())(**given)
    with Engine.Config(max_len=16, max_rows=1).build(model) as engine:
        options = SamplingOptions(temperature=1.5, seed=2, max_tokens=9)
        assert engine.stream(Request((3, 1, 4), options)).result().ids == tuple(found.tolist())


def test_greedy_sampling_ignores_the_key(generator):
    greedy = generator(context=8, temperature=0)
    one, two = (greedy([1, 2], num_tokens=12, key=jax.random.key(seed)).tolist() for seed in (1, 2))
    assert one == two


def test_a_low_temperature_is_close_to_greedy(generator):
    cold, greedy = (
        generator(context=8, temperature=temperature)([1, 2], num_tokens=12, key=KEY).tolist()
        for temperature in (1e-4, 0)
    )
    assert cold == greedy


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_sampled_tokens_are_distributed_as_softmax_of_the_logits(generator, logits_of, temperature):
    """With a context of one token, each token depends only on the token before it."""
    count = 6000
    tokens = generator(context=1, temperature=temperature)([0], num_tokens=count, key=jax.random.key(7))
    before = np.concatenate([[0], tokens[:-1]])
    chi_square, degrees = 0.0, 0
    for token in range(VOCAB):
        followers = tokens[before == token]
        logits = logits_of([token])[0] / temperature
        expected = np.exp(logits - logits.max())
        expected *= len(followers) / expected.sum()
        seen = np.bincount(followers, minlength=VOCAB)
        rare = expected < 5  # too rare for the approximation, so counted together
        groups = [(seen[i], expected[i]) for i in np.flatnonzero(~rare)]
        if expected[rare].sum() >= 5:
            groups.append((seen[rare].sum(), expected[rare].sum()))
        if len(groups) > 1:
            chi_square += sum((s - e) ** 2 / e for s, e in groups)
            degrees += len(groups) - 1
    assert degrees > 20
    # Within 4.5 standard deviations (Wilson and Hilferty 1931): a correct sampler fails for about one in 300,000 keys.
    z = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    assert z < 4.5


def test_sampling_no_tokens_returns_no_tokens(model):
    assert generate(model, [1, 2], num_tokens=0, context=8, key=KEY).shape == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [[1, 2]]}, "at least one token"),
        ({"prompt": 3}, "at least one token"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"context": 0}, "context"),
        ({"context": -3}, "context"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"prompt": [1, VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_invalid_arguments_raise_with_their_name(model, changes, message):
    arguments = {"prompt": [1], "num_tokens": 2, "context": 4, "key": KEY, "temperature": 1.0, **changes}
    with pytest.raises(AxcoreError, match=message):
        generate(model, arguments.pop("prompt"), **arguments)


def test_adapters_require_a_cache(generator):
    without = generator(context=16)
    for use in (
        lambda: generator(context=16, adapters=object()),
        lambda: without.load_adapter("sql", "runs/sql"),
        lambda: without([1], num_tokens=2, key=KEY, adapter="sql"),
    ):
        with pytest.raises(AxcoreError, match=r"adapters? .*requires? a cache, such as ContiguousCache"):
            use()


# With a cache.


@pytest.fixture(scope="module")
def cached(generator):
    return generator(context=40, temperature=0, cache=ContiguousCache.Config())


@pytest.mark.parametrize("prompt_len", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (16, 17, 30))])
def test_padding_and_a_cache_do_not_change_samples(cached, logits_of, prompt_len):
    prompt = np.random.default_rng(prompt_len).integers(0, VOCAB, prompt_len)
    found = cached(prompt, num_tokens=6, key=KEY)
    assert found.size == 6 and found.tolist() == naive_greedy(logits_of, [*prompt, *found], prompt_len, context=40)


@pytest.mark.long
def test_twenty_prompts_of_different_lengths_compile_few_programs(model):
    """The model for decoding and for prompts of up to 16 and 32 tokens, and the sampler."""
    generator = Generator(model, context=32, temperature=0, cache=ContiguousCache.Config())
    for length in range(1, 21):
        assert generator(np.ones(length, int), num_tokens=length % 7, key=KEY).size == length % 7
    assert generator._engine.stats.compiled == 3 + 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("context", "cache"), [(8, None), (40, ContiguousCache.Config())], ids=["recomputed", "cached"]
)
def test_a_sample_ends_with_the_first_end_token(generator, context, cache):
    make = functools.partial(generator, context=context, temperature=0, cache=cache)
    whole = make()([3, 1, 4], num_tokens=6, key=KEY).tolist()
    absent = set(range(VOCAB)) - set(whole)
    for ends in (whole[0], whole[5]):
        found = make(eos_ids=frozenset({ends, *absent}))([3, 1, 4], num_tokens=6, key=KEY).tolist()
        assert found == whole[: whole.index(ends) + 1]


def test_with_a_cache_prompt_and_sample_are_limited_to_the_context(cached):
    assert cached([1] * 30, num_tokens=10, key=KEY).size == 10
    with pytest.raises(AxcoreError, match=r"prompt of 30 tokens plus num_tokens=11 exceeds context=40"):
        cached([1] * 30, num_tokens=11, key=KEY)


def test_a_context_longer_than_the_model_supports_raises(model):
    learned = ax.pipe(model.config, ax.use("learned-positions", max_len=8)).build(rngs=ax.Rngs(0))
    Generator(learned, context=8, cache=ContiguousCache.Config())
    for cache in (None, ContiguousCache.Config()):
        with pytest.raises(AxcoreError, match=r"the row has 9 tokens, but max_len=8"):
            generate(learned, [1], num_tokens=2, context=9, key=KEY, cache=cache)
