"""`DrafterSuite` fails for drafters that are wrong in one way, and passes for those of the core."""

import jax
import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.infer import Engine
from axcore.infer.speculation import NGram
from axcore.testing import DrafterSuite
from axcore.testing.drafter import MAX_LEN

from .wrong import instance, names


@pytest.mark.long
class TestNGram(DrafterSuite):
    name = "ngram"
    options = {"prompt_lookup_min": 1}


@pytest.mark.slow
class TestDraftModel(DrafterSuite):
    name = "draft-model"
    min_accepted = 9  # of the same model

    def draft_model(self):
        return self.model().build(rngs=ax.Rngs(0))


def drafter(edit):
    """A drafter whose proposals are edited: `edit(drafter, sequences, drafts) -> drafts`."""

    class Made(NGram):
        class Config(NGram.Config):
            pass

        def propose(self, sequences, seeds):
            given = list(sequences)
            return edit(self, given, {each.id: (1, 2) for each in given})

    return Made.Config(num_speculative_tokens=3)


def shortened(_, sequences, drafts):
    """Removes the last token of a row."""
    for each in sequences:
        each.tokens.pop()
    return drafts


def compiled_late(self, sequences, drafts):
    """Compiles a program for each length of a row."""
    for each in sequences:
        self.seen = {*getattr(self, "seen", ()), len(each.tokens)}
        jax.jit(lambda row: row + 1)(jnp.zeros(len(each.tokens)))
    self.num_traced = len(getattr(self, "seen", ()))
    return drafts


CONTRACT, ACCEPTED = (
    "test_drafts_are_token_ids_of_the_given_sequences",
    "test_drafts_are_accepted_when_a_request_is_repeated",
)
WRONG = {
    "beyond the vocabulary": (lambda self, seqs, drafts: dict.fromkeys(drafts, (99,)), CONTRACT, "not token ids"),
    "negative": (lambda self, seqs, drafts: dict.fromkeys(drafts, (-1,)), CONTRACT, "not token ids from 0 to 31"),
    "too many": (lambda self, seqs, drafts: dict.fromkeys(drafts, (1, 2, 3, 4)), CONTRACT, "4 drafts, at most"),
    "arrays": (lambda self, seqs, drafts: dict.fromkeys(drafts, jnp.ones(2, int)), CONTRACT, "not a tuple of int"),
    "of others": (lambda self, seqs, drafts: {id + 100: each for id, each in drafts.items()}, CONTRACT, "not the id"),
    "edits tokens": (shortened, CONTRACT, "propose changed the tokens"),
    "none": (lambda self, seqs, drafts: {}, CONTRACT, "no drafts were proposed"),
    "never right": (lambda self, seqs, drafts: dict.fromkeys(drafts, ()), ACCEPTED, "0 drafts were accepted"),
    "compiles late": (compiled_late, "test_nothing_compiles_after_warm_up", "were compiled after warm_up"),
}  # fmt: skip


@pytest.mark.parametrize("name", names(WRONG, ("beyond the vocabulary",)))
def test_case_a_wrong_drafter_fails(name):
    edit, check, message = WRONG[name]
    cfg = Engine.Config(max_len=MAX_LEN, max_rows=2, step_tokens=16, speculation=drafter(edit))
    with pytest.raises(AssertionError, match=message):
        getattr(instance(DrafterSuite, name="ngram", config=lambda self: cfg), check)()
