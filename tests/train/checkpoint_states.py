"""States to save, and processes that save them."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax


def make_state(seed: int, size: int = 1000):
    """A state with every kind of leaf and container that a training state has."""
    rng = np.random.default_rng(seed)
    params = {
        "layer": {"kernel": jnp.asarray(rng.standard_normal((size, 8)), jnp.float32)},
        "blocks": [jnp.asarray(rng.standard_normal(3), jnp.bfloat16), jnp.zeros((0, 4))],
        "scale": jnp.asarray(rng.standard_normal(4), jnp.float8_e4m3fn),
    }
    keys = {"one": jax.random.key(seed), "many": jax.random.split(jax.random.key(seed, impl="rbg"), 3)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params["layer"])
    return {"params": params, "keys": keys, "optimizer": optimizer, "step": jnp.int32(seed)}


def abstract(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save(checkpointer, step, state=None):
    state = make_state(step) if state is None else state
    checkpointer.save(step, state, data={"position": step}, meta={"lr": 0.1})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def run_python(code: str, *arguments: object, devices: int = 1, stderr: str = "") -> str:
    """The stdout of a Python process, which must succeed and print exactly `stderr` to stderr."""
    env = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == stderr, done.stdout + done.stderr
    return done.stdout
