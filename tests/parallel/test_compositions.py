"""Composed layouts: loss, gradients and one update on eight devices equal those on one device."""

import functools

import numpy as np
import pytest

from axcore.testing.devices import compare

from .compositions import COMPOSITIONS, cases, name

TOLERANCE = 1e-5
LARGER_TOLERANCES = {"decoder.layers.attention.A_log": 3e-5}
"""The gradient of Mamba-2's A_log is a sum of large terms of opposite signs: with data parallelism alone, its rounding
error is already 1.6e-5."""
CI = (4, 8, 36, 42)
"""Indices of the compositions that CI checks. Together they use every strategy."""


@functools.cache
def comparisons(compositions):
    return compare(cases(compositions))


@pytest.mark.parametrize(
    ("composition", "together"),
    [
        *(pytest.param(COMPOSITIONS[i], CI, id=name(COMPOSITIONS[i]), marks=pytest.mark.long) for i in CI),
        *(
            pytest.param(composition, (i,), id=name(composition), marks=pytest.mark.slow)
            for i, composition in enumerate(COMPOSITIONS)
            if i not in CI
        ),
    ],
)
def test_step_equals_one_device(composition, together):
    """`together` are the indices of the compositions that one process computes."""
    found = comparisons(tuple(COMPOSITIONS[i] for i in together))[name(composition)]
    for metric, (several, one) in found.metrics.items():
        np.testing.assert_allclose(several, one, rtol=TOLERANCE, err_msg=metric)
    for kind, errors in (("gradient", found.gradients), ("update", found.updates)):
        assert errors
        wrong = {path: error for path, error in errors.items() if not error <= LARGER_TOLERANCES.get(path, TOLERANCE)}
        assert not wrong, f"relative error of the {kind}: {wrong}"
    assert max(found.param_shards.values()) > 1 or composition.mesh.shape.keys() == {"data"}
