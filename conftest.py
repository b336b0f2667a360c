"""What runs by day and what at night, over all distributions."""

import pytest

BY_DAY = ("tests/testing/", "tests/parallel/", "plugins/axcore-moe/")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(config, items):
    """The suites' comparison of eight devices with one takes a process that compiles twice: by day for a few only."""
    for item in items:
        folder = item.path.relative_to(config.rootpath).as_posix()
        if item.name == "test_eight_devices_agree_with_one" and not folder.startswith(BY_DAY):
            item.add_marker(pytest.mark.slow)
