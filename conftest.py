"""Marks the costliest checks of the conformance suites `slow`, over all distributions."""

import pytest

WHOLE_BY_DAY = ("tests/testing/", "tests/parallel/")
AT_NIGHT = (
    "test_eight_devices_agree_with_one",  # a process that compiles twice
    "test_bfloat16_is_close_to_float32",
    "test_remat_does_not_change_results",
    "test_vmap_agrees_with_single_examples",
    "test_rows_of_a_batch_are_independent",
)
"""Checks of the conformance suites that compile a model once more: slow, except in the folders above."""


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is not asked for
def pytest_collection_modifyitems(config, items):
    for item in items:
        file = item.path.relative_to(config.rootpath).as_posix()
        if item.name in AT_NIGHT and not file.startswith(WHOLE_BY_DAY):
            item.add_marker(pytest.mark.slow)
