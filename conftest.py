"""Pytest settings of all distributions.

Tests run on the CPU, share compiled programs between processes and runs, and use few, reproducible hypothesis examples
without a deadline. The slowest checks of the conformance suites are marked `slow`.
"""

import os
import pathlib
import sys

# Before jax is imported; child processes inherit these.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # tests compile more than they run
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "axcore", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("axcore")

COMPLETE_IN_CI = ("tests/testing/", "tests/parallel/")
NIGHTLY = (
    "test_eight_devices_agree_with_one",  # a process that compiles twice
    "test_bfloat16_is_close_to_float32",
    "test_remat_does_not_change_results",
    "test_vmap_agrees_with_single_examples",
    "test_rows_of_a_batch_are_independent",
    "test_documents_of_a_row_are_independent",
    "test_decoding_equals_recomputation",
)
"""Checks of the conformance suites that compile another model. They are slow, except in the folders above."""


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(config, items):
    for item in items:
        file = item.path.relative_to(config.rootpath).as_posix()
        if item.name in NIGHTLY and not file.startswith(COMPLETE_IN_CI):
            item.add_marker(pytest.mark.slow)


MOST_MAPPINGS = 30_000
"""Each compiled program has about ten memory mappings. Linux allows 65,530 in a process, and XLA crashes beyond."""


def pytest_runtest_teardown(item, nextitem):
    """Drops the compiled programs of finished files before a process has too many."""
    maps = pathlib.Path("/proc/self/maps")
    is_last = nextitem is None or nextitem.path != item.path
    if "jax" in sys.modules and is_last and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        sys.modules["jax"].clear_caches()
