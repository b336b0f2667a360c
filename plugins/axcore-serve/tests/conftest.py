"""A server of a scripted engine."""

import pytest

from .scripted import Scripted
from .support import serving


@pytest.fixture(scope="module")
def running():
    """A server of a scripted engine."""
    with serving(Scripted(), scores_prompts=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(running):
    with running.client() as client:
        yield client
