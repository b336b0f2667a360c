"""A plugin that only tests see. `tests/conftest.py` puts it on the path for the tests that ask for it."""
