"""Decodes on eight CPU devices and on one; `axcore.testing.devices.on_devices` runs `main`."""


def main():
    import jax
    import jax.numpy as jnp
    import numpy as np

    import axcore as ax
    from axcore.infer import Decoder, Step
    from axcore.nn import ContiguousCache
    from axcore.parallel import Mesh
    from axcore.testing import tiny_model
    from axcore_paged_kv.cache import PagedCache

    rules = {"batch": "data", "head": "tensor", "kv_head": "tensor", "embed": "data", "mlp": "tensor"}
    layout = Mesh(shape={"data": 4, "tensor": 2}, rules=rules).make()
    model = ax.pipe(tiny_model(), ax.use("paged-attention", interpret=True)).build(rngs=ax.Rngs(0))
    ids = jax.random.randint(jax.random.key(4), (4, 9), 0, 32)
    tables = jnp.asarray([[7, 2, 10], [1, 9, 10], [0, 5, 3], [8, 6, 4]])

    def decoded(layout, cache):
        decoder, params, state = Decoder.of(model, cache=cache, batch_size=4, max_len=12, layout=layout)
        pages = tables if isinstance(cache, PagedCache.Config) else None
        step = jax.jit(decoder.__call__, donate_argnums=1)
        lengths = jnp.asarray([5, 3, 5, 4])
        first, state = step(params, state, Step(ids[:, :5], jnp.zeros(4, jnp.int32), lengths=lengths, pages=pages))
        second, state = step(params, state, Step(ids[:, 5:6], lengths, pages=pages))
        return np.concatenate([first, second], axis=1)

    caches = {
        "pages": PagedCache.Config(page_size=4, num_pages=10),
        "int8 pages": PagedCache.Config(page_size=4, num_pages=10, dtype="int8"),
        "contiguous": ContiguousCache.Config(),
    }
    return {name: (decoded(None, cache), decoded(layout, cache)) for name, cache in caches.items()}
