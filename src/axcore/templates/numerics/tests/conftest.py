"""Runs the tests with JAX on CPU and fast compilation, unless the environment sets these variables."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # tests compile more than they run
