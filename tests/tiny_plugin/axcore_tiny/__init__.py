"""A plugin for tests. `tests/conftest.py` adds it to the path for tests that request it."""
