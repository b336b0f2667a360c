"""Small models and layers with FP8."""

import jax.numpy as jnp

import axcore as ax
from axcore.nn import Linear, Repeat
from axcore.testing import tiny_model
from axcore_fp8.fp8 import Fp8


def model(num_layers=4, **options):
    """A small bfloat16 model whose inner layers have FP8 products."""
    cfg = tiny_model()
    decoder = cfg.decoder.set(num_layers=num_layers)
    return ax.pipe(cfg.set(decoder=decoder, dtypes=ax.DTypes(compute=jnp.bfloat16)), ax.use("fp8", **options))


def linear(input_dim, output_dim, dtype="float32", **options):
    """(call, params, state) of a linear map with FP8 products."""
    cfg = Linear.Config(
        input_dim=input_dim,
        output_dim=output_dim,
        numerics=Fp8.Config(**options),
        dtypes=ax.DTypes(compute=dtype),
    )
    return ax.functional(cfg.build(rngs=ax.Rngs(0)))


def scanned(cfg, remat):
    """The model with this remat policy in every scan."""
    return ax.select(cfg, Repeat).set(remat=remat)
