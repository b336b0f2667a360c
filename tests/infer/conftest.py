import pytest

import axcore as ax
from axcore.testing.models import tiny_model


@pytest.fixture(scope="module")
def model():
    """A small model with weights so large that the next token depends on those before it."""
    cfg = ax.select(tiny_model(), "embedding").set(init=ax.nn.Normal(stddev=1.0))
    return ax.pipe(cfg, ax.use("rope")).build(rngs=ax.Rngs(0))
