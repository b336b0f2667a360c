"""Random models on random meshes: a step on eight devices equals that on one device, or raises before it compiles.

An example takes several seconds to compile, so examples are few, have fixed seeds and are not shrunk.
"""

import functools
import itertools
import re

import numpy as np
import pytest

from axcore.config import ConfigError
from axcore.testing.devices import COUNT, compare
from axcore.train.step.program import program

from .shapes import case_of, drawn, misfits

TOLERANCE = 1e-5
FITTING = tuple(itertools.islice((seed for seed in itertools.count(100) if not misfits(drawn(seed))), 27))
OTHERS = tuple(itertools.islice((seed for seed in itertools.count(100) if misfits(drawn(seed))), 24))
CI = (105, 107, 119, 132)


@functools.cache
def compared(seeds):
    return compare({str(drawn(seed)): case_of(drawn(seed)) for seed in seeds})


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.long if seed in CI else pytest.mark.slow) for seed in FITTING]
)
def test_step_equals_one_device(seed):
    found = compared(CI if seed in CI else (seed,))[str(drawn(seed))]
    for metric, (several, one) in found.metrics.items():
        assert np.isfinite(one).all()
        np.testing.assert_allclose(several, one, rtol=TOLERANCE, err_msg=f"{drawn(seed)}: {metric}")
    for kind, errors in (("gradient", found.gradients), ("update", found.updates)):
        wrong = {path: error for path, error in errors.items() if not error <= TOLERANCE}
        assert errors and not wrong, f"{drawn(seed)}: relative error of the {kind}: {wrong}"


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.long if i < 6 else pytest.mark.slow) for i, seed in enumerate(OTHERS)]
)
def test_a_shape_that_does_not_fit_raises_with_the_sizes_and_advice(seed):
    case = case_of(drawn(seed))
    cfg = case.parallel
    with pytest.raises(ConfigError) as error:  # devices that are not there: nothing can be compiled
        layout = cfg.mesh.abstract(COUNT, "cpu")
        program(cfg.model, cfg.learner, layout, cfg.objective, cfg.microbatches).trace_train(case.batch)
    assert any(re.search(text, str(error.value)) for text in misfits(drawn(seed))), str(error.value)
