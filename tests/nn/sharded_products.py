"""Products of a local implementation on CPU devices and on one; `axcore.testing.devices.on_devices` runs `main`."""

from typing import Any

MESHES = {
    "tensor": {"tensor": 4},
    "fsdp, tensor": {"fsdp": 2, "tensor": 2},
}
COLUMNS, ROWS = ("embed", "mlp"), ("mlp", "embed")
CASES: dict[str, tuple[str, Any, tuple[int, ...], int]] = {
    # mesh, axes of the matrix, shape of x, outputs
    "columns": ("tensor", COLUMNS, (1, 1, 16), 8),
    "rows": ("tensor", ROWS, (1, 1, 16), 8),
    "columns, inputs sharded": ("fsdp, tensor", COLUMNS, (1, 16), 8),
    "rows, over both axes": ("fsdp, tensor", ROWS, (1, 16), 8),
    "replicated": ("tensor", (None, None), (1, 16), 8),
    "axes not known": ("tensor", None, (1, 16), 8),
    "not divisible": ("tensor", COLUMNS, (1, 16), 6),
    "several rows": ("tensor", COLUMNS, (2, 16), 8),
}


def main():
    """For each case and with and without scales: the product and the gradients on one device and on the mesh, there the
    shapes of the matrices that the implementation gets, and the collectives of the product."""
    import math
    import re

    import jax
    import jax.numpy as jnp
    import numpy as np

    from axcore.nn import Matmul, Plain
    from axcore.parallel import Mesh, is_sharded

    seen = []

    class Local(Matmul):
        """Runs on shards of one row."""

        def is_local(self, rows: int) -> bool:
            return rows == 1

        def __call__(self, x, weight, accumulate=None, scales=None):
            if math.prod(x.shape[:-1]) == 1:
                assert not is_sharded()
                seen.append(weight.shape)
            return super().__call__(x, weight, accumulate, scales)

    def case(mesh, axes, shape, outputs, scaled):
        random = np.random.default_rng(0)
        x, weight, scales = (
            jnp.asarray(random.normal(size=each), jnp.float32) for each in (shape, (shape[-1], outputs), (outputs,))
        )
        product = Plain(Local(), axes)

        def run(x, weight, scales):
            return product.scaled(x, weight, scales, jnp.float32) if scaled else product(x, weight)

        def gradients(x, weight, scales):
            return jax.grad(lambda *args: (run(*args) ** 2).sum(), (0, 1))(x, weight, scales)

        one = run(x, weight, scales), *gradients(x, weight, scales)
        seen.clear()
        sizes = MESHES[mesh]
        layout = Mesh(shape=sizes).make(jax.devices()[: math.prod(sizes.values())])
        with layout.active():
            found = jax.jit(run)(x, weight, scales), *jax.jit(gradients)(x, weight, scales)
            shards, spec = set(seen), layout.spec(axes or (None, None), weight.shape)
            placed = jax.device_put(weight, jax.NamedSharding(layout.mesh, spec))
            text = jax.jit(run).lower(x, placed, scales).compile().as_text()
        collectives = re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", text)
        return jax.device_get(one), jax.device_get(found), shards, collectives

    return {(name, scaled): case(*given, scaled) for name, given in CASES.items() for scaled in (False, True)}
