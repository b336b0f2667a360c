"""`RecurrentSuite` fails for layers that are wrong in one way. Correct ones pass in tests/nn/test_recurrent.py."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from axcore.nn import Documents

from ..nn import test_recurrent as correct
from .wrong import names

DECAY, REACH, Average, Last = correct.DECAY, correct.REACH, correct.Average, correct.Last


class MixesRows(Average):
    def advance(self, before, documents, x):
        return super().advance(before, documents, x + x.mean(axis=0))


class LooksAhead(Average):
    def advance(self, before, documents, x):
        return super().advance(before, documents, jnp.roll(x, -1, axis=1))


class IgnoresDocuments(Average):
    def advance(self, before, documents, x):
        return super().advance(before, dataclasses.replace(documents, numbers=None), x)


class CountsPadding(Average):
    def advance(self, before, documents, x):
        return super().advance(before, dataclasses.replace(documents, valid=None), x)


class Forgets(Average):
    def advance(self, before, documents, x):
        return super().advance({"last": 0 * before["last"]}, documents, x)


class RoundsState(Average):
    """Carries bfloat16."""

    def advance(self, before, documents, x):
        y, after = super().advance(before, documents, x)
        return y, {"last": after["last"].astype(jnp.bfloat16)}


class KeepsNewestState(Average):
    """Has only the state after the last token, whichever is replaced."""

    def _one_by_one(self, *args):
        y, kept, numbers = super()._one_by_one(*args)
        return y, {name: jnp.broadcast_to(each[:, -1:], each.shape) for name, each in kept.items()}, numbers


class StartsFromOldState(Average):
    def _read(self, name, rows):
        return super()._read(name, rows._replace(start=jnp.maximum(rows.start, 1)))


class GoesOn(Average):
    """Computes something for a row that does not continue its state."""

    def _continue(self, tokens, batch):
        rows = super()._continue(tokens, batch)
        return rows._replace(is_valid=jnp.ones_like(rows.is_valid))


class IgnoresSlots(Average):
    def _continue(self, tokens, batch):
        rows = super()._continue(tokens, batch)
        return rows._replace(slots=None if rows.slots is None else jnp.arange(batch))


class StopsGradient(Average):
    """The gradients of a token do not reach those before it."""

    def advance(self, before, documents, x):
        y, after = super().advance(before, documents, x)
        return jax.lax.stop_gradient(y - x) + x, after


class TooShort(Last):
    def __call__(self, x, tokens):
        inputs = self.lagged(x, tokens)
        return sum(DECAY**lag * inputs[lag] for lag in range(REACH))


class LagsAcrossDocuments(Last):
    def lagged(self, x, tokens):
        found = super().lagged(x, tokens)
        return dataclasses.replace(found, documents=(Documents(),) * len(found.documents))


class KeepsNoInputs(Last):
    """Sees only the inputs of a call."""

    def __call__(self, x, tokens):
        lags = range(min(REACH + 1, x.shape[1]))
        return sum(DECAY**lag * jnp.pad(x, ((0, 0), (lag, 0), (0, 0)))[:, : x.shape[1]] for lag in lags)


FORMULA, GRADIENTS, PACKED, STEPS, REPLACED, AGAIN, NAN, WIDTHS = (
    "test_outputs_equal_the_formula",
    "test_gradients_equal_those_of_the_formula",
    "test_packed_documents_equal_separate_rows",
    "test_steps_of_any_width_equal_one_call",
    "test_the_last_tokens_can_be_replaced",
    "test_a_row_that_starts_again_sees_nothing_of_the_previous_one",
    "test_a_row_that_cannot_go_on_is_nan_and_keeps_its_state",
    "test_rows_of_several_widths_in_one_call",
)
WRONG = {
    MixesRows: FORMULA,
    LooksAhead: FORMULA,
    TooShort: FORMULA,
    StopsGradient: GRADIENTS,
    IgnoresDocuments: PACKED,
    LagsAcrossDocuments: PACKED,
    CountsPadding: STEPS,
    Forgets: STEPS,
    RoundsState: STEPS,
    KeepsNoInputs: STEPS,
    KeepsNewestState: REPLACED,
    StartsFromOldState: AGAIN,
    GoesOn: NAN,
    IgnoresSlots: WIDTHS,
}


@pytest.mark.parametrize("kind", names(WRONG, (CountsPadding, IgnoresDocuments, KeepsNewestState)))
def test_case_a_wrong_layer_fails(kind):
    right = correct.TestWindowed if issubclass(kind, Last) else correct.TestRecurrent
    suite = type("Suite", (right,), {"__test__": False, "config": lambda self: kind.Config(input_dim=2)})()
    with pytest.raises(AssertionError):
        getattr(suite, WRONG[kind])()
