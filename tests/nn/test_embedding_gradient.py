"""The gradient of an embedding is summed in float32, and needs no second table."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import functional
from axcore.nn import Embedding
from axcore.numerics import gather

VOCAB, DIM = 7, 3


@pytest.mark.parametrize("param", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_case_the_gradient_of_a_frequent_token_is_exact(param, compute):
    """4,096 terms of 0.01: in bfloat16 the sum stops at 4."""
    types = ax.DTypes(param=param, compute=compute)
    fn, params, state = functional(
        Embedding.Config(vocab_size=VOCAB, output_dim=DIM, dtypes=types).build(rngs=ax.Rngs(0))
    )
    ids = np.zeros((2, 2100), np.int32)
    ids[:, 2048:] = np.random.default_rng(0).integers(1, VOCAB, (2, 52))
    weights = np.full((2, 2100, DIM), 0.01)

    def loss(params):
        x = fn(params, state, ids)[0][0]
        assert x.dtype == compute
        return (x * jnp.asarray(weights, x.dtype)).astype(jnp.float32).sum()

    found = jax.jit(jax.grad(loss))(params)["weight"]
    expected = np.zeros((VOCAB, DIM))
    np.add.at(expected, ids, np.asarray(jnp.asarray(weights, compute), np.float64))
    assert found.dtype == param
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8 if param == "bfloat16" else 1e-4)


def test_gathered_values_are_rounded_once():
    table = jax.random.normal(jax.random.key(0), (VOCAB, DIM))
    ids = jnp.asarray([[6, 0], [3, 3]])
    np.testing.assert_array_equal(gather(table, ids, jnp.bfloat16), np.asarray(table.astype(jnp.bfloat16))[ids])


MEMORY = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from axcore.numerics import gather

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    rows, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P("tensor", "fsdp"))

    def step(table, ids, g):
        grad = jax.grad(lambda table: (gather(table, ids, jnp.bfloat16) * g).astype(jnp.float32).sum())(table)
        return table - 0.1 * grad

    for vocab in (1024, 65536):
        shapes = (vocab, 64), (8, 32), (8, 32, 64)
        arrays = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, (jnp.float32, jnp.int32, jnp.bfloat16))]
        jitted = jax.jit(step, in_shardings=(whole, rows, rows), out_shardings=whole, donate_argnums=0)
        print(jitted.lower(*arrays).compile().memory_analysis().temp_size_in_bytes)
"""


def test_the_gradient_of_a_sharded_table_needs_no_second_table():
    flags = "--xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(MEMORY)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.split())
    shard = (65536 - 1024) * 64 * 4 // 8
    assert large - small <= 1.1 * shard, (small, large)
