"""Verified drafts give the distribution of the model, and the tokens of sampling without drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from axcore.infer.requests import SamplingOptions
from axcore.infer.sampling import Counts, NextToken, SamplingRows, sample, seed_words, verify
from axcore.infer.sampling.acceptance import NO_DRAFT
from axcore.infer.sampling.rows import PADDING
from axcore.infer.sampling.seeds import gumbel_noise

VOCAB, SAMPLES, WIDTH = 5, 6_000, 3
OPTIONS = SamplingOptions(temperature=0.8, top_p=0.9)
LAST = 2
"""The token that every sample starts with."""


def model_logits(seed):
    """Logits [before, vocab] of a model that sees one token."""
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)) * 1.5


def probabilities(logits, options):
    """Float64 probabilities after temperature and top-p, by sorting."""
    found = np.zeros_like(logits)
    for row, each in zip(found, logits, strict=True):
        p = np.exp((each - each.max()) / options.temperature)
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        kept = order[: 1 + np.searchsorted(np.cumsum(p[order]), options.top_p * (1 - 2.0**-22))]
        row[kept] = p[kept] / p[kept].sum()
    return found


def rows_of(first_position, width, options=OPTIONS):
    """The next `width` tokens of each sample."""
    tokens = [
        NextToken(options, seed_words(seed), first_position + at, at, seed)
        for seed in range(SAMPLES)
        for at in range(width)
    ]
    return SamplingRows.of(tokens, vocab_size=VOCAB, method="full")


def counts_of(num_slots):
    return Counts.zeros(num_slots, VOCAB)


@jax.jit
def step(target, last, drafts, rows):
    """Verifies drafts after `last`."""
    row = jnp.concatenate([last[:, None], drafts], axis=1)
    return verify(target[row], drafts, rows, counts_of(SAMPLES))


def drafted(draft, last, first_position, how):
    """Two drafts of each sample, from the distribution of a draft model."""
    found = []
    for at in range(WIDTH - 1):
        logits = jnp.asarray(draft)[last]
        if how == "coupled":  # with the random numbers of the model's own sample
            rows = rows_of(first_position + at, 1)
            last = sample(logits, rows, counts_of(SAMPLES)).tokens
        elif how == "sampled":
            last = jax.random.categorical(jax.random.key(at), logits / OPTIONS.temperature)
        else:
            last = jnp.argmax(logits, axis=-1)
        found.append(last)
    return jnp.stack(found, axis=1).astype(jnp.int32)


def continued(target, draft, how, verifier=step):
    """Three tokens of each sample: those of a verified step, and then of steps without drafts. Also the share of
    accepted first drafts."""
    target, last = jnp.asarray(target, jnp.float32), jnp.full((SAMPLES,), LAST)
    drafts = drafted(draft, last, 1, how)
    found = verifier(target, last, drafts, rows_of(1, WIDTH))
    tokens, num = np.array(found.sampled.tokens).reshape(SAMPLES, WIDTH), np.array(found.num_tokens)
    assert num.min() >= 1
    for at in range(1, WIDTH):
        own = sample(target[tokens[:, at - 1]], rows_of(1 + at, 1), counts_of(SAMPLES)).tokens
        tokens[:, at] = np.where(at < num, tokens[:, at], own)
    return tokens, np.mean(num > 1)


def p_value(tokens, target):
    """Of a chi-squared test of all triples against the exact joint distribution; 0 if a triple is impossible."""
    p = probabilities(target, OPTIONS)
    joint = (p[LAST][:, None, None] * p[:, :, None] * p[None, :, :]).ravel()
    observed = np.bincount(tokens @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**3)
    if observed[joint == 0].sum():
        return 0.0
    frequent = joint * SAMPLES >= 5
    expected = np.append(joint[frequent], joint[~frequent].sum()) * SAMPLES
    counted = np.append(observed[frequent], observed[~frequent].sum())
    return scipy.stats.chisquare(counted[expected > 0], expected[expected > 0]).pvalue


@pytest.mark.parametrize("how", [pytest.param("coupled", marks=pytest.mark.long), "sampled", "greedy"])
def test_tokens_have_the_distribution_of_the_model_and_are_those_without_drafts(how):
    target, draft = model_logits(0), model_logits(0) + 0.6 * model_logits(1)
    tokens, accepted = continued(target, draft, how)
    assert p_value(tokens, target) > 1e-3
    last, alone = jnp.full((SAMPLES,), LAST), []
    for at in range(WIDTH):
        last = sample(jnp.asarray(target, jnp.float32)[last], rows_of(1 + at, 1), counts_of(SAMPLES)).tokens
        alone.append(np.asarray(last))
    np.testing.assert_array_equal(tokens, np.stack(alone, axis=1))
    p, q = (probabilities(each, OPTIONS)[LAST] for each in (target, draft))
    distance = np.abs(p - q).sum() / 2
    if how == "greedy":  # a certain draft is accepted as often as by rejection sampling: min(1, p / 1)
        np.testing.assert_allclose(accepted, p[np.argmax(draft[LAST])], atol=0.02)
    elif how == "coupled":  # arXiv 2408.07978, theorem 2; rejection sampling accepts 1 - distance
        assert (1 - distance) / (1 + distance) - 0.02 < accepted <= 1 - distance + 0.02
    else:
        assert accepted < 1 - distance


def accepts_by_ratio_without_residual(target, last, drafts, rows):
    """Accepts with probability min(1, p / q), but then samples from p instead of the residual of p - q."""
    found, draft = step(target, last, drafts, rows), model_logits(0) + 0.6 * model_logits(1)
    p, q = (probabilities(np.asarray(each, np.float64), OPTIONS) for each in (target, draft))
    row = np.concatenate([np.asarray(last)[:, None], np.asarray(drafts)], axis=1)
    ratio = p[row[:, :-1], row[:, 1:]] / np.maximum(q[row[:, :-1], row[:, 1:]], 1e-9)
    accepted = np.cumprod(np.random.default_rng(0).random(ratio.shape) < ratio, axis=1)
    tokens = np.array(found.sampled.tokens).reshape(SAMPLES, WIDTH)
    tokens[:, :-1] = np.where(accepted, drafts, tokens[:, :-1])
    return with_tokens(found, tokens, 1 + accepted.sum(axis=1))


def accepts_likely_drafts(target, last, drafts, rows):
    """Accepts every draft of at least half the probability of the best token."""
    found = step(target, last, drafts, rows)
    row = np.concatenate([np.asarray(last)[:, None], np.asarray(drafts)], axis=1)
    p = probabilities(np.asarray(target, np.float64), OPTIONS)[row[:, :-1]]
    likely = np.take_along_axis(p, row[:, 1:, None], axis=2)[..., 0] > 0.5 * p.max(axis=2)
    accepted = np.cumprod(likely, axis=1)
    tokens = np.array(found.sampled.tokens).reshape(SAMPLES, WIDTH)
    tokens[:, :-1] = np.where(accepted, drafts, tokens[:, :-1])
    return with_tokens(found, tokens, 1 + accepted.sum(axis=1))


def shares_random_numbers_between_positions(target, last, drafts, rows):
    ints = np.array(rows.ints)
    ints[:, 2] = 1
    return step(target, last, drafts, SamplingRows(**{**vars(rows), "ints": ints}))


def keeps_the_token_after_a_rejected_draft(target, last, drafts, rows):
    found = step(target, last, drafts, rows)
    return with_tokens(
        found, np.array(found.sampled.tokens).reshape(SAMPLES, WIDTH), np.minimum(found.num_tokens + 1, WIDTH)
    )


def with_tokens(found, tokens, num_tokens):
    sampled = type(found.sampled)(tokens.reshape(-1), None)
    return type(found)(sampled, num_tokens)


@pytest.mark.parametrize(
    "fault",
    [
        accepts_by_ratio_without_residual,
        accepts_likely_drafts,
        shares_random_numbers_between_positions,
        keeps_the_token_after_a_rejected_draft,
    ],
)
def test_wrong_rules_of_acceptance_are_noticed(fault):
    target, draft = model_logits(0), model_logits(0) + 0.6 * model_logits(1)
    tokens, _ = continued(target, draft, "sampled", fault)
    assert p_value(tokens, target) < 1e-6


PENALIZED = SamplingOptions(
    temperature=0.7, seed=3, frequency_penalty=0.9, presence_penalty=0.4, repetition_penalty=1.5, logit_bias={1: 0.7}
)


@pytest.mark.parametrize("drafts", [(3, 3, 1), (3, 3, NO_DRAFT), (NO_DRAFT,) * 3, "own"])
def test_penalties_count_the_drafts_before_a_token(drafts):
    """As if each token was sampled in a step of its own, with end tokens excluded up to `min_tokens`."""
    vocab, width, slots, end = 8, 4, 3, 4
    options = SamplingOptions(**{**vars(PENALIZED), "min_tokens": 2, "stop_token_ids": (end,)})
    logits = np.random.default_rng(1).normal(size=(width, vocab)).astype(np.float32) * 2
    logits[:2, end] = 30
    start = Counts(
        jnp.zeros((slots, vocab), bool).at[1, 6].set(True), jnp.zeros((slots, vocab), jnp.int32).at[1, 3].set(2)
    )
    each = [NextToken(options, seed_words(3), 7 + at, at, 1) for at in range(width)]

    counts, alone, given = start, [], []
    for at in range(width):
        rows = SamplingRows.of([each[at]], vocab_size=vocab)
        token = int(sample(jnp.asarray(logits[at : at + 1]), rows, counts).tokens[0])
        alone.append(token)
        given.append(token if drafts == "own" else drafts[min(at, 2)])
        counts = counts.plus(np.array([1]), np.array([given[-1]]))
    assert end not in alone[:2]
    drafts = np.array([given[: width - 1], [0] * (width - 1)])
    both = SamplingRows.of([*each, *[PADDING] * width], vocab_size=vocab)
    stacked = jnp.stack([jnp.asarray(logits), jnp.full((width, vocab), jnp.nan)])
    found = jax.jit(verify)(stacked, drafts, both, start)
    num = int(found.num_tokens[0])
    assert found.num_tokens[1] == 0, "a row without finite logits gets a token"
    accepted = 0
    while accepted < width - 1 and given[accepted] == alone[accepted]:
        accepted += 1
    assert num == 1 + accepted
    assert np.asarray(found.sampled.tokens[:num]).tolist() == alone[:num]
    assert drafts.tolist()[0] != alone[:-1] or num == width


def test_a_row_whose_later_logits_are_not_finite_keeps_the_tokens_before_them():
    logits = np.zeros((1, 3, 8), np.float32)
    logits[0, 0, 5] = logits[0, 2, 1] = 9
    logits[0, 1] = np.nan
    rows = SamplingRows.of([PADDING] * 3, vocab_size=8)
    assert verify(jnp.asarray(logits), np.array([[5, 1]]), rows).num_tokens.tolist() == [1]
    assert verify(jnp.asarray(logits), np.array([[4, 1]]), rows).num_tokens.tolist() == [1]


def test_noise_of_a_position_is_that_of_one_step():
    words = jnp.array([seed_words(4)] * 3, jnp.uint32)
    together = gumbel_noise(words, jnp.array([7, 8, 9]), VOCAB)
    alone = [gumbel_noise(words[:1], jnp.array([at]), VOCAB)[0] for at in (7, 8, 9)]
    np.testing.assert_array_equal(together, jnp.stack(alone))
