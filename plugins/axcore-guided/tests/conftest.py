"""An engine with grammars."""

import pytest

from .support import guided_engine, text_model


@pytest.fixture(scope="session")
def model():
    return text_model()


@pytest.fixture(scope="session")
def engine(model):
    with guided_engine(model) as engine:
        yield engine
