"""Reading masks as the flags of fused kernels."""

import pytest

from axcore.nn import And, Causal, Full, MaskForm, Prefix, SameSegment, SlidingWindow, mask_refusal
from axcore.testing import training_request


@pytest.mark.parametrize(
    ("mask", "form"),
    [
        (Full(), MaskForm(False, None, False)),
        (Causal(), MaskForm(True, None, False)),
        (Causal() & SameSegment(), MaskForm(True, None, True)),
        (SlidingWindow(size=9) & SameSegment() & SlidingWindow(size=4), MaskForm(False, 4, True)),
        (And(masks=(Full(),)), MaskForm(False, None, False)),
        (Causal() | SameSegment(), None),
        (Causal() & Prefix(size=3), None),
        ((Causal() | Prefix(size=3)) & SameSegment(), None),
    ],
    ids=repr,
)
def test_form_of_a_mask(mask, form):
    assert MaskForm.of(mask) == form


class OwnCausal(Causal):
    """A causal mask with other rules."""


def test_a_subclass_has_no_form():
    """Its `allowed` may differ."""
    assert MaskForm.of(OwnCausal()) is None


CAUSAL_WINDOW, WINDOW = Causal() & SlidingWindow(size=4), SlidingWindow(size=4)


@pytest.mark.parametrize(
    ("changes", "kernel", "reason"),
    [
        ({}, {}, None),
        ({"mask": CAUSAL_WINDOW}, {}, None),
        ({"mask": CAUSAL_WINDOW}, {"windows": "none"}, "supports full attention, causal masks and documents, not"),
        ({"mask": WINDOW}, {}, "causal masks, causal windows and documents, not SlidingWindow(size=4)"),
        ({"mask": WINDOW}, {"windows": "any"}, None),
        ({"mask": Causal() | WINDOW}, {"windows": "any"}, "full attention, causal masks, windows and documents, not"),
        ({}, {"documents": "none"}, "causal windows, not Causal() & SameSegment() on packed rows"),
        ({"packed": False}, {"documents": "none"}, None),
        ({"mask": Causal()}, {"documents": "none"}, None),
        ({"aligned": False}, {"documents": "any"}, "requires queries and keys of the same tokens for Causal()"),
        ({"aligned": False, "mask": WINDOW}, {"windows": "any"}, "got 64 queries and 64 keys of different tokens"),
        ({"aligned": False, "mask": SameSegment()}, {}, "requires queries and keys of the same tokens"),
        ({"aligned": False, "mask": SameSegment()}, {"documents": "any"}, None),
        ({"aligned": False, "mask": SameSegment(), "packed": False}, {}, None),
        ({"aligned": False, "mask": Full()}, {}, None),
    ],
    ids=str,
)
def test_reasons_to_refuse_a_mask(changes, kernel, reason):
    found = mask_refusal(training_request("gpu", "", **changes), **kernel)
    assert (found is None) if reason is None else (reason in found)
