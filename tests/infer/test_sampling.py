"""Sampling against NumPy in float64, and its independence of everything but the row."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axcore.config import ConfigError
from axcore.infer.requests import SamplingOptions
from axcore.infer.sampling import Counts, NextToken, SamplingRows, sample, seed_words, truncation
from axcore.infer.sampling.rows import PADDING
from axcore.infer.sampling.seeds import gumbel_noise
from axcore.testing.devices import on_devices

VOCAB, PADDED, SLOTS = 61, 64, 6
END = 2
ROWS = 10
"""Most tests pad to this number of rows, so that they share few compiled programs."""

LONG = pytest.mark.long

call = jax.jit(sample)


def token(options, *, seed=0, position=5, num_output=9, slot=0, grammar=None):
    return NextToken(options, seed_words(seed), position, num_output, slot, grammar)


def mask_of(allowed, vocab_size=VOCAB):
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def random_logits(seed, rows, step=0.5, scale=3.0):
    """Multiples of `step`, so that many are equal. Columns of padding have the largest logits."""
    logits = np.random.default_rng(seed).normal(size=(rows, PADDED)) * scale
    logits = np.round(logits / step) * step
    logits[:, VOCAB:] = 100
    return logits.astype(np.float32)


def random_counts(seed):
    rng = np.random.default_rng(seed)
    prompt, output = rng.random((SLOTS, PADDED)) < 0.2, rng.poisson(0.3, (SLOTS, PADDED))
    return Counts(prompt, output.astype(np.int32))


def reference(logits, each, counts):
    """`[vocab]` float64 probabilities of one row, with a sort. At temperature 0, untruncated ones at 1."""
    options, x = each.options, np.asarray(logits, np.float64)[:VOCAB].copy()
    prompt, output = (np.asarray(count)[each.slot, :VOCAB] for count in (counts.prompt, counts.output))
    for id in range(VOCAB):
        if prompt[id] or output[id]:
            x[id] = x[id] / options.repetition_penalty if x[id] > 0 else x[id] * options.repetition_penalty
        x[id] -= options.frequency_penalty * output[id]
        x[id] -= options.presence_penalty * (output[id] > 0)
        x[id] += options.logit_bias.get(id, 0)
        if each.num_output < options.min_tokens and id in (END, *options.stop_token_ids):
            x[id] = -np.inf
        if each.grammar is not None and not each.grammar.view(np.uint32)[id // 32] >> np.uint32(id % 32) & 1:
            x[id] = -np.inf
    z = x - x.max()
    if options.temperature:
        z = z / options.temperature
        # Equal float32 logits must be equal here.
        order = np.argsort(-z.astype(np.float32), kind="stable")
        order = order[z[order] >= (np.log(options.min_p) if options.min_p else -np.inf)]
        order = order[: options.top_k]
        mass = np.cumsum(np.exp(z[order])) / np.exp(z[order]).sum()
        order = order[: np.searchsorted(mass, options.top_p - 1e-7) + 1] if options.top_p < 1 else order
        kept = np.full_like(z, -np.inf)
        kept[order] = z[order]
        z = kept
    return np.exp(z) / np.exp(z).sum()


def call_padded(logits, tokens, counts, **given):
    """The result of `sample` with `ROWS` rows, without those of padding."""
    padded = np.zeros((ROWS, PADDED), np.float32)
    padded[: len(tokens)] = logits
    tokens = [*tokens, *[PADDING] * (ROWS - len(tokens))]
    found = call(padded, SamplingRows.of(tokens, vocab_size=VOCAB, eos_ids=(END,), **given), counts)
    return jax.tree.map(lambda x: np.asarray(x)[: len(logits)], found)


def distribution(logits, tokens, counts):
    """`[rows, vocab]` probabilities that `sample` reports, and its result."""
    everything = mask_of(range(VOCAB))
    tokens = [
        dataclasses.replace(
            each,
            options=dataclasses.replace(each.options, logprobs=VOCAB),
            grammar=everything if each.grammar is None else each.grammar,
        )
        for each in tokens
    ]
    found = call_padded(logits, tokens, counts, method="full", logprobs="processed")
    probabilities = np.zeros((len(tokens), PADDED))
    np.put_along_axis(
        probabilities, np.asarray(found.logprobs.top_ids), np.exp(np.asarray(found.logprobs.top, np.float64)), axis=1
    )
    assert not probabilities[:, VOCAB:].any()
    return probabilities[:, :VOCAB], found


def check(logits, tokens, counts):
    given, found = distribution(logits, tokens, counts)
    for row, each in enumerate(tokens):
        wanted = reference(logits[row], each, counts)
        np.testing.assert_array_equal(given[row] > 0, wanted > 0, err_msg=str(each))
        np.testing.assert_allclose(given[row], wanted, rtol=2e-5, atol=1e-9)
        sampled = int(found.tokens[row])
        assert wanted[sampled] > 0
        if each.options.temperature == 0:
            assert sampled == np.argmax(wanted)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"temperature": 1e-4},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": VOCAB + 5},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"top_p": 1e-9},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 1.7},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.7},
        {"presence_penalty": 1.3},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
        {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5, "logit_bias": {3: 2.0}},
        {"logit_bias": {0: 5.0, 60: -100.0}},
        pytest.param({"logit_bias": {id: 0.25 * id for id in range(40)}}, marks=LONG),
        {"min_tokens": 10, "stop_token_ids": (4, 5), "logit_bias": {4: 50.0, END: 50.0}},
        {"min_tokens": 9, "stop_token_ids": (4, 5), "logit_bias": {4: 5.0, END: 5.0}},
    ],
    ids=str,
)
def test_each_rule(options):
    check(
        random_logits(1, 5),
        [token(SamplingOptions(**options), seed=row, slot=row) for row in range(5)],
        random_counts(2),
    )


def test_grammar():
    allowed = [{0}, {60}, {31, 32, 33}, set(range(0, VOCAB, 3))]
    tokens = [token(SamplingOptions(top_p=0.9), slot=row, grammar=mask_of(each)) for row, each in enumerate(allowed)]
    check(random_logits(3, 4), tokens, random_counts(4))


option_sets = st.builds(
    lambda temperature, top_k, top_p, min_p, penalties, bias: SamplingOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        frequency_penalty=penalties[0],
        presence_penalty=penalties[1],
        repetition_penalty=penalties[2],
        logit_bias=bias,
        min_tokens=12,
    ),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([None, 1, 3, 10, 60]),
    st.sampled_from([1.0, 0.05, 0.45, 0.93]),
    st.sampled_from([0.0, 0.03, 0.3]),
    st.sampled_from([(0.0, 0.0, 1.0), (0.5, 0.0, 1.0), (0.0, 1.5, 2.0)]),
    st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-2.0, 1.0, 4.0]), max_size=3),
)
token_sets = st.builds(
    lambda options, seed, position, slot, allowed: token(
        options, seed=seed, position=position, slot=slot, grammar=allowed and mask_of(allowed)
    ),
    option_sets,
    st.integers(-(2**70), 2**70),
    st.integers(0, 2**30),
    st.integers(0, SLOTS - 1),
    st.none() | st.sets(st.integers(10, VOCAB - 1), min_size=1),
)


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.lists(token_sets, min_size=4, max_size=4), st.integers(0, 99))
def test_combined_rules(tokens, seed):
    check(random_logits(seed, 4, step=0.25), tokens, random_counts(seed))


def bits(found, row):
    """The result of one row."""
    return [np.asarray(leaf)[row].tobytes() for leaf in jax.tree.leaves(found)]


@LONG
@hypothesis.settings(max_examples=5)
@hypothesis.given(st.lists(token_sets, min_size=5, max_size=5), st.integers(0, 99), st.permutations(range(5)))
def test_row_is_independent_of_its_batch(tokens, seed, order):
    """Alone, permuted with other slots, and among padding."""
    logits, counts = random_logits(seed, 5, step=1e-3), random_counts(seed)
    options = [dataclasses.replace(each.options, logprobs=20) for each in tokens]
    tokens = [dataclasses.replace(each, options=given) for each, given in zip(tokens, options, strict=True)]

    def run(indices, size, logits=logits, tokens=tokens, counts=counts):
        x = np.full((size, PADDED), np.nan, np.float32)
        x[: len(indices)] = logits[np.array(indices)]
        chosen = [*(tokens[row] for row in indices), *[PADDING] * (size - len(indices))]
        return call(x, SamplingRows.of(chosen, vocab_size=VOCAB, eos_ids=(END,), method="full"), counts)

    together = run(range(5), 5)
    # The slot of row i is i in another order of the counts.
    moved = [dataclasses.replace(each, slot=(each.slot + 1) % SLOTS) for each in tokens]
    rolled = Counts(np.roll(counts.prompt, 1, 0), np.roll(counts.output, 1, 0))
    permuted = run(order, 8, tokens=moved, counts=rolled)
    for row in range(5):
        assert bits(run([row], 1), 0) == bits(together, row) == bits(permuted, order.index(row))
    assert (permuted.tokens[5:] == -1).all()


@LONG
@pytest.mark.parametrize("method", ["greedy", "plain", "full"])
def test_large_rows_are_independent_of_their_batch(method):
    vocab = 4099
    logits = np.asarray(np.random.default_rng(0).normal(size=(9, vocab)) * 2, jnp.bfloat16)
    options = {
        "greedy": SamplingOptions(temperature=0.0, logprobs=20),
        "plain": SamplingOptions(temperature=0.8, logprobs=20),
        "full": SamplingOptions(top_p=0.9, top_k=500, logprobs=20),
    }[method]
    tokens = [token(options, seed=row) for row in range(9)]
    counts = Counts.zeros(1, vocab)

    def run(rows):
        return call(logits[np.array(rows)], SamplingRows.of([tokens[row] for row in rows], vocab_size=vocab), counts)

    together = run(range(9))
    for rows in ([3], [8, 3], [3, 4, 5, 6, 7]):
        assert bits(run(rows), rows.index(3)) == bits(together, 3)


def sharded_bits(shapes):
    """The result of each row on meshes of these shapes, and on one device."""
    logits, counts = random_logits(5, 4, step=0.25), random_counts(6)
    options = SamplingOptions(
        top_k=30, top_p=0.9, min_p=0.001, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={7: 2.0}, logprobs=5
    )
    tokens = [token(options, seed=row, slot=row, grammar=mask_of(range(row, VOCAB))) for row in range(4)]
    rows = SamplingRows.of(tokens, vocab_size=VOCAB, eos_ids=(END,))
    results = [call(logits, rows, counts)]
    for shape in shapes:
        mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "tensor"))
        by_row, by_slot = (NamedSharding(mesh, PartitionSpec(axis, "tensor")) for axis in ("data", None))
        results.append(call(jax.device_put(logits, by_row), rows, jax.device_put(counts, by_slot)))
    return [[bits(found, row) for row in range(4)] for found in results]


@LONG
def test_sharded_vocabulary():
    single, *sharded = on_devices(sharded_bits, [(1, 8), (2, 4)])
    assert sharded == [single, single]


@LONG
def test_greedy_is_the_same_in_every_method():
    """In bfloat16 many logits are equal. The first of them wins."""
    logits = random_logits(7, 8, scale=2).astype(jnp.bfloat16)
    tokens = [token(SamplingOptions(temperature=0.0, top_k=3, top_p=0.1, min_p=0.5), seed=row) for row in range(8)]
    wanted = np.argmax(np.asarray(logits, np.float32)[:, :VOCAB], axis=1)
    top = np.sort(np.asarray(logits, np.float32)[:, :VOCAB], axis=1)[:, -2:]
    assert (top[:, 0] == top[:, 1]).any()
    for method in ("greedy", "plain", "full"):
        rows = SamplingRows.of(tokens, vocab_size=VOCAB, method=method)
        np.testing.assert_array_equal(call(logits, rows, Counts.zeros(SLOTS, PADDED)).tokens, wanted)


def test_exact_boundaries_of_top_p():
    """Ten equal tokens: top_p = i / 10 keeps exactly the first i."""
    logits = np.full((10, PADDED), -np.inf)
    logits[:, 3:13] = 1.5
    tokens = [token(SamplingOptions(top_p=share / 10)) for share in range(1, 11)]
    given, _ = distribution(logits, tokens, Counts.zeros(SLOTS, PADDED))
    for share, row in enumerate(given, 1):
        np.testing.assert_array_equal(np.flatnonzero(row), np.arange(3, 3 + share))


def test_top_k_keeps_the_first_of_equal_tokens():
    logits = np.zeros((1, PADDED))
    logits[0, 40] = 1.0
    given, _ = distribution(logits, [token(SamplingOptions(top_k=3))], Counts.zeros(SLOTS, PADDED))
    np.testing.assert_array_equal(np.flatnonzero(given[0]), [0, 1, 40])


@LONG
@pytest.mark.parametrize("search_bits", [1, 4])
def test_width_of_the_search_has_no_effect(search_bits, monkeypatch):
    rng = np.random.default_rng(8)
    z = rng.normal(size=(6, 301)) * 4
    z = jnp.asarray(z - z.max(axis=1, keepdims=True), jnp.float32)
    k, p, m = jnp.asarray([1, 5, 301, 301, 40, 200]), jnp.asarray([1, 1, 0.9, 0.3, 0.7, 0.99]), jnp.full((6,), -9.0)

    def kept():
        return np.asarray(jax.jit(lambda z: truncation.kept_tokens(z, top_k=k, top_p=p, log_min_p=m))(z))

    wanted = kept()
    monkeypatch.setattr(truncation, "SEARCH_BITS", search_bits)
    np.testing.assert_array_equal(kept(), wanted)
    assert wanted.sum(axis=1)[:2].tolist() == [1, 5]


def test_exact_sum():
    weights = np.exp(-np.random.default_rng(9).exponential(6, size=(3, 20_000))).astype(np.float32)
    given = np.asarray(jax.jit(truncation.exact_sum)(weights))
    np.testing.assert_allclose(given, weights.astype(np.float64).sum(axis=1), rtol=2e-7)
    shuffled = np.random.default_rng(0).permutation(weights, axis=1)
    np.testing.assert_array_equal(jax.jit(truncation.exact_sum)(shuffled), given)


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(),
        pytest.param(SamplingOptions(temperature=0.7, top_k=12, top_p=0.9), marks=LONG),
        pytest.param(
            SamplingOptions(
                temperature=1.4, min_p=0.05, presence_penalty=0.5, repetition_penalty=1.3, logit_bias={5: 1.0}
            ),
            marks=LONG,
        ),
    ],
    ids=["plain", "truncated", "penalties"],
)
def test_distribution_of_5000_seeds(options):
    logits, counts = random_logits(10, 1, scale=1.0), random_counts(11)
    seeds = 5000
    tokens = [token(options, seed=seed, position=3, slot=1) for seed in range(seeds)]
    found = call(jnp.tile(logits, (seeds, 1)), SamplingRows.of(tokens, vocab_size=VOCAB), counts)
    expected = seeds * reference(logits[0], tokens[0], counts)
    observed = np.bincount(np.asarray(found.tokens), minlength=VOCAB)
    assert not observed[expected == 0].any()
    rare = (expected < 5) & (expected > 0)
    common = expected >= 5
    groups = [np.append(each[common], each[rare].sum()) for each in (observed, expected)]
    if not rare.any():
        groups = [each[:-1] for each in groups]
    assert common.sum() > 5
    assert scipy.stats.chisquare(*groups).pvalue > 1e-3


def noise(seeds, positions, vocab=64):
    words = jnp.asarray([seed_words(seed) for seed in seeds], jnp.uint32)
    return np.asarray(jax.jit(gumbel_noise, static_argnums=2)(words, jnp.asarray(positions), vocab))


@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_noise_is_independent(over):
    drawn = noise([7] * 2000, range(2000)) if over == "positions" else noise(range(2000), [7] * 2000)
    assert scipy.stats.kstest(drawn.ravel(), scipy.stats.gumbel_r.cdf).pvalue > 1e-3
    for numbers in (drawn, drawn[:64].T):  # tokens, then positions or seeds
        correlation = np.corrcoef(numbers, rowvar=False) - np.eye(numbers.shape[1])
        assert np.abs(correlation).max() < (0.1 if numbers is drawn else 0.6)
    assert np.abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.02


def test_noise_of_a_token_does_not_depend_on_the_vocabulary():
    np.testing.assert_array_equal(noise([1], [2], vocab=31), noise([1], [2], vocab=64)[:, :31])


def test_seeds():
    words = {seed: seed_words(seed) for seed in (0, 1, -1, 2**31, 2**32, 2**40, -(2**40), 2**64, 2**64 + 1, 2**200)}
    assert len(set(words.values())) == len(words)
    assert seed_words(5) == seed_words(5) != seed_words(5, sample=1)
    assert seed_words(None) != seed_words(None)
    assert all(0 <= word < 2**32 for pair in words.values() for word in pair)
    pairs = jnp.asarray([(1, 2), (1, 3), (0, 2), seed_words(0), seed_words(2**40)], jnp.uint32)
    drawn = np.asarray(jax.jit(gumbel_noise, static_argnums=2)(pairs, jnp.full((5,), 3), 8))
    assert len({row.tobytes() for row in drawn}) == 5  # both words count


@pytest.mark.parametrize("method", ["greedy", "plain", "full"])
@pytest.mark.parametrize("bad", [-np.inf, np.nan, np.inf], ids=str)
def test_invalid_rows(method, bad):
    logits = random_logits(12, 3)
    logits[1], logits[1, 4] = -np.inf, bad
    tokens = [token(SamplingOptions(temperature=0.0 if method == "greedy" else 1.0, logprobs=30))] * 3
    found = call_padded(logits, tokens, Counts.zeros(SLOTS, PADDED), method=method)
    assert (found.tokens >= 0).tolist() == [True, False, True]
    assert found.tokens[1] == -1 and found.logprobs.token[1] == -np.inf and (found.logprobs.top[1] == -np.inf).all()
    assert np.isfinite(found.logprobs.token[::2]).all()


def test_grammar_and_min_tokens_that_exclude_every_token():
    tokens = [token(SamplingOptions(min_tokens=20), grammar=mask_of({END})), token(SamplingOptions(), slot=1)]
    _, found = distribution(random_logits(13, 2), tokens, Counts.zeros(SLOTS, PADDED))
    assert (found.tokens >= 0).tolist() == [False, True] and found.tokens[0] == -1


def test_extreme_options_stay_finite():
    limits = [
        SamplingOptions(frequency_penalty=3e38, temperature=3e38),
        SamplingOptions(presence_penalty=-3e38, temperature=1e-30),
        SamplingOptions(repetition_penalty=1e-30, top_p=1e-30),
        SamplingOptions(logit_bias={1: 3e38}, temperature=1e-5, min_p=1e-30),
    ]
    tokens = [token(options, slot=4) for options in limits]
    output = np.zeros((SLOTS, PADDED), np.int32)
    output[4, 9] = 2
    _, found = distribution(random_logits(14, 4) - 4, tokens, Counts(np.zeros((SLOTS, PADDED), bool), output))
    assert (found.tokens >= 0).all() and found.tokens[0] != 9 and found.tokens[1] == 9 and found.tokens[3] == 1


@pytest.mark.parametrize("method", ["greedy", "plain", "full"])
def test_raw_log_probabilities(method):
    """Those of softmax(logits), whatever the options are, with the ranks of the order of `top_ids`."""
    logits = random_logits(15, 6)
    options = {"temperature": 0.5, "logit_bias": {3: 4.0}, "top_k": 9} if method == "full" else {}
    options |= {"temperature": 0.0} if method == "greedy" else {}
    tokens = [token(SamplingOptions(**options, logprobs=30), seed=row) for row in range(6)]
    found = call_padded(logits, tokens, Counts.zeros(SLOTS, PADDED), method=method)
    x = np.asarray(logits, np.float64)[:, :VOCAB]
    wanted = x - x.max(axis=1, keepdims=True)
    wanted -= np.log(np.exp(wanted).sum(axis=1, keepdims=True))
    order = np.argsort(-x, axis=1, kind="stable")
    chosen, ids = np.asarray(found.tokens)[:, None], np.asarray(found.logprobs.top_ids)
    np.testing.assert_allclose(found.logprobs.token, np.take_along_axis(wanted, chosen, 1)[:, 0], atol=2e-6)
    np.testing.assert_array_equal(ids, order[:, :32])  # 30 is rounded up
    np.testing.assert_allclose(found.logprobs.top, np.take_along_axis(wanted, order[:, :32], 1), atol=2e-6)
    np.testing.assert_array_equal(found.logprobs.rank, np.argmax(order == chosen, axis=1))


def test_counts():
    counts = random_counts(16)
    ids = np.array([[5, 5, 6, 5, 7], [1, 2, 3, 0, 0], [9, 9, 9, 9, 9]])

    @jax.jit
    def changed(counts, ids):
        restarted = counts.restarted(
            jnp.array([4, 1, -1]), ids, prompt_lengths=jnp.array([2, 3, 5]), lengths=jnp.array([5, 3, 5])
        )
        return restarted.plus(jnp.array([4, 1, -1, SLOTS, 0]), jnp.array([6, 3, 9, 9, -1]))

    added = changed(counts, ids)
    prompt, output = np.array(counts.prompt), np.array(counts.output)
    prompt[[4, 1]], output[[4, 1]] = False, 0
    prompt[4, 5], prompt[1, [1, 2, 3]] = True, True
    output[4, [5, 6, 7]], output[1, 3] = [1, 2, 1], 1
    np.testing.assert_array_equal(added.prompt, prompt)
    np.testing.assert_array_equal(added.output, output)


def test_methods_are_separate_programs():
    cases = {
        "greedy": SamplingOptions(temperature=0.0, top_k=4),
        "plain": SamplingOptions(temperature=0.5),
        "full": SamplingOptions(top_p=0.5),
    }
    texts = []
    for method, options in cases.items():
        rows = SamplingRows.of([token(options)], vocab_size=VOCAB)
        assert rows.method == method
        texts.append(jax.jit(sample).lower(jnp.zeros((1, PADDED)), rows, Counts.zeros(1, PADDED)).as_text())
    assert ["threefry" in text or "xor" in text for text in texts] == [False, True, True]
    assert not jax.tree.leaves(SamplingRows.of([token(cases["greedy"])], vocab_size=VOCAB))
    for changed in ({"frequency_penalty": 1.0}, {"logit_bias": {1: 1.0}}, {"min_tokens": 10}):
        assert token(SamplingOptions(temperature=0.0, **changed)).method == "full"


def test_arrays_of_each_step_are_new():
    """JAX on CPU may read NumPy memory after a call returns."""
    tokens = [token(SamplingOptions(top_k=3), grammar=mask_of({1}))]
    first, second = (jax.tree.leaves(SamplingRows.of(tokens, vocab_size=VOCAB)) for _ in range(2))
    assert len(first) == 5
    assert not any(np.shares_memory(a, b) for a in first for b in second)
    assert not any(np.shares_memory(a, tokens[0].grammar) for a in first)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"method": "plain"}, "method='plain' ignores options of a row that needs 'full'"),
        ({"vocab_size": 2**19}, "vocab_size=524288 must be from 1 to 524287"),
        ({"vocab_size": 80}, "grammar of row 0 must be int32 .3., one bit for each of 80 tokens, got int32 .2."),
    ],
)
def test_wrong_packing(given, message):
    tokens = [token(SamplingOptions(), grammar=mask_of({1})), token(SamplingOptions())]
    with pytest.raises(ConfigError, match=message):
        SamplingRows.of(tokens, **{"vocab_size": VOCAB} | given)


def test_wrong_arguments():
    rows = SamplingRows.of([token(SamplingOptions(top_k=2))], vocab_size=VOCAB)
    with pytest.raises(ConfigError, match=r"at least 61 columns, got float32 .1, 60."):
        sample(jnp.zeros((1, 60)), rows)
    with pytest.raises(ConfigError, match="counts must be Counts of 64 tokens for the method 'full', not None"):
        sample(jnp.zeros((1, 64)), rows)
