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

    rules = {"batch": "data", "head": "tensor", "kv_head": "tensor", "embed": "data", "mlp": "tensor"}
    layout = Mesh(shape={"data": 4, "tensor": 2}, rules=rules).make()
    model = tiny_model().build(rngs=ax.Rngs(0))
    ids = jax.random.randint(jax.random.key(4), (4, 9), 0, 32)

    def decoded(layout):
        decoder, params, state = Decoder.of(
            model, cache=ContiguousCache.Config(), batch_size=4, max_len=12, layout=layout
        )
        step = jax.jit(decoder.__call__, donate_argnums=1)
        first, state = step(params, state, Step(ids[:, :5], jnp.zeros(4, jnp.int32)))
        second, state = step(params, state, Step(ids[:, 5:6], jnp.full((4,), 5)))
        return np.concatenate([first, second], axis=1), state

    one, _ = decoded(None)
    eight, state = decoded(layout)
    keys = state["model"]["decoder"]["layers"][0]["attention"]["cache"]["keys"]
    shards = keys.size // keys.addressable_shards[0].data.size
    return {"one": one, "eight": eight, "cache_shards": shards}
