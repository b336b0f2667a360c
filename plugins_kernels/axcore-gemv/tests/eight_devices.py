"""Products and engines on several CPU devices and on one; `axcore.testing.devices.on_devices` runs the functions."""

import contextlib
from unittest import mock


@contextlib.contextmanager
def interpreted():
    """Runs the kernel on CPUs. Yields the shapes [output_dim, input_dim] of the matrices that it reads."""
    from axcore_gemv import matmul

    seen, product = [], matmul.product

    def run(x, weight, *args, **options):
        seen.append(weight.shape)
        return product(x, weight, *args, **options, interpret=True)

    with (
        mock.patch.object(matmul, "target_device", lambda: ("gpu", "NVIDIA H200")),
        mock.patch.object(matmul, "product", run),
    ):
        yield seen


CASES = {  # mesh, axes of the matrix
    "columns": ({"tensor": 4}, ("embed", "mlp")),
    "rows": ({"tensor": 4}, ("mlp", "embed")),
    "head": ({"tensor": 2}, ("embed", "vocab")),
    "columns, inputs sharded": ({"fsdp": 2, "tensor": 2}, ("embed", "mlp")),
    "columns of 2 bytes": ({"tensor": 4}, ("mlp", "embed")),
}


def products():
    """For each case, and for a bfloat16 matrix and for int8 codes with scales: the product of a row and the matrix on
    one device and on the mesh, and there the shapes that the kernel reads."""
    import math

    import jax
    import jax.numpy as jnp
    import numpy as np

    from axcore.nn import Plain
    from axcore.parallel import Mesh
    from axcore_gemv.matmul import Gemv

    def case(name, codes):
        sizes, axes = CASES[name]
        depth = 8 if name == "columns of 2 bytes" else 64
        random = np.random.default_rng(0)
        x = jnp.asarray(random.normal(size=(1, 1, depth)), jnp.bfloat16)
        weight = jnp.asarray(random.integers(-128, 128, (depth, 32)), jnp.int8 if codes else jnp.bfloat16)
        scales = jnp.asarray(random.uniform(0.01, 0.02, 32), jnp.float32)
        product = Plain(Gemv(warps=1, programs=1), axes)

        def run(x, weight, scales):
            return product.scaled(x, weight, scales, jnp.float32) if codes else product(x, weight, jnp.float32)

        layout = Mesh(shape=sizes).make(jax.devices()[: math.prod(sizes.values())])
        with interpreted() as seen:
            one = run(x, weight, scales)
            seen.clear()
            with layout.active():
                several = jax.jit(run)(x, weight, scales)
        return np.asarray(one), np.asarray(several), set(seen)

    return {(name, codes): case(name, codes) for name in CASES for codes in (False, True)}


def engines(numbers, codes):
    """What a request gets from an engine with XLA's products on one device, and from one with the kernel on each number
    of devices: the ids, their log-probabilities and the shapes that the kernel reads.

    Args:
        codes: whether the matrices are int8 codes.
    """
    import jax

    import axcore as ax
    from axcore.infer import Engine, Request, SamplingOptions
    from axcore.nn import FeedForward
    from axcore.parallel import Mesh
    from axcore.testing import tiny_model
    from axcore_gemv.feature import use_gemv

    cfg = ax.select(tiny_model(), "embedding").set(init=ax.nn.Normal(stddev=1.0))
    cfg = ax.select(cfg, FeedForward).set(hidden_dim=32)
    if codes:
        cfg = ax.use("int8", activation_scales=None)(cfg)
        cfg = ax.select(cfg, lambda _, node: hasattr(node, "stored")).set(stored=True)
    request = Request((3, 1, 4), SamplingOptions(temperature=0.0, max_tokens=6, logprobs=1))

    def run(cfg, layout):
        model = cfg.build(rngs=ax.Rngs(0))
        with interpreted() as seen, Engine.Config(max_len=16, max_rows=1).build(model, layout=layout) as engine:
            (found,) = engine.generate([request])
        return {"ids": found.ids, "logprobs": [each.logprob for each in found.logprobs], "seen": set(seen)}

    layouts = [Mesh(shape={"tensor": number}).make(jax.devices()[:number]) for number in numbers]
    return run(cfg, None), [run(use_gemv(cfg), layout) for layout in layouts]
