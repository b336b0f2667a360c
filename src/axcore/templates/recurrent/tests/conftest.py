"""Runs the tests on the CPU with quick compilation, unless JAX_PLATFORMS or XLA_FLAGS is set."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # tests compile more than they run
