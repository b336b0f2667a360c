"""Composed layouts: loss, gradients and one update on eight devices equal those on one device."""

import functools

import numpy as np
import pytest

from axcore.testing.devices import compare

from .compositions import ROWS, cases, name

TOLERANCE = 1e-5
NOISY = {"decoder.layers.attention.A_log": 3e-5}
"""Larger tolerances. The gradient of Mamba-2's A_log adds large terms of both signs: data parallelism alone already
rounds it by 1.6e-5."""
CI = (4, 8, 36, 42)
"""Indices of the rows that CI checks: together they use every strategy."""


@functools.cache
def compared(rows):
    return compare(cases(rows))


@pytest.mark.parametrize(
    ("row", "group"),
    [
        *(pytest.param(ROWS[i], "ci", id=name(ROWS[i]), marks=pytest.mark.long) for i in CI),
        *(pytest.param(row, "all", id=name(row), marks=pytest.mark.slow) for i, row in enumerate(ROWS) if i not in CI),
    ],
)
def test_step_equals_one_device(row, group):
    rows = tuple(ROWS[i] for i in CI) if group == "ci" else tuple(row for i, row in enumerate(ROWS) if i not in CI)
    found = compared(rows)[name(row)]
    for metric, (several, one) in found.metrics.items():
        np.testing.assert_allclose(several, one, rtol=TOLERANCE, err_msg=metric)
    for kind, errors in (("gradient", found.gradients), ("update", found.updates)):
        assert errors
        wrong = {path: error for path, error in errors.items() if not error <= NOISY.get(path, TOLERANCE)}
        assert not wrong, f"relative error of the {kind}: {wrong}"
    assert max(found.param_shards.values()) > 1 or row.mesh.shape.keys() == {"data"}
