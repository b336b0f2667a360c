"""What the tests of the suites share: instances of suites, and when a wrong plugin is checked."""

import pytest


def instance(suite, **attributes):
    """An instance of a suite with these attributes and methods, which pytest does not collect."""
    return type("Suite", (suite,), {"__test__": False, **attributes})()


def names(wrong, often):
    """The names of wrong plugins as parameters of a test. Those in `often` are checked in CI, the others at night."""
    return [pytest.param(name, marks=pytest.mark.long if name in often else pytest.mark.slow) for name in wrong]
