"""What all tests share: jax on CPU, and quick compilation. What the environment says goes first."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # tests compile more than they run
