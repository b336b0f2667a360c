"""Attention with context parallelism on eight CPU devices, which another process imports by name."""

import math

import jax
import numpy as np

import axcore as ax
from axcore.nn import ReferenceKernel, attend
from axcore.testing.attention_cases import CASES, arrays_of, inputs_of


def results(calls):
    """For each (name of a case, mesh): {"heads": ..., "lse": ..., and the gradient of each input}."""
    return [_result(CASES[name], mesh) for name, mesh in calls]


def heads_grad(case):
    """The gradient of the heads."""
    shape = (2, case.query_len, case.heads, case.value_dim or case.head_dim)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _result(case, mesh):
    layout = mesh.make(jax.devices()[: math.prod(mesh.shape.values())])
    kernel = ReferenceKernel.Config(head_dim=case.head_dim).build(rngs=ax.Rngs(0))

    def call(arrays):
        inputs = inputs_of(case, arrays, return_lse=True)
        with ax.module.root(kernel, key=None, training=True), layout.active():
            heads, lse = attend(kernel, inputs)
        return (heads * heads_grad(case)).sum(), (heads, lse)

    grads, (heads, lse) = jax.jit(jax.grad(call, has_aux=True))(arrays_of(case, "float32"))
    return jax.device_get({"heads": heads, "lse": lse} | grads)
