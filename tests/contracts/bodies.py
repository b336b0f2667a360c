"""Layers under `shard_map` on eight CPU devices and on one; `axcore.testing.devices.on_devices` runs `main`."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import axcore as ax
from axcore.module import GradientState, abstract, custom_vjp
from axcore.nn import FeedForward, Linear, Normal
from axcore.parallel import Mesh, shard_map
from axcore.testing.models import by_path

DIM, HIDDEN, EXPERTS, ROWS, SEQ = 8, 12, 16, 8, 6
MESHES = {
    "expert=8": Mesh(shape={"expert": 8}, rules={"batch": "expert", "expert": "expert"}),
    "expert=4, data=2": Mesh(shape={"data": 2, "expert": 4}, rules={"batch": ("data", "expert"), "expert": "expert"}),
    "expert=4, fsdp=2": Mesh(
        shape={"fsdp": 2, "expert": 4}, rules={"batch": "fsdp", "expert": "expert", "embed": "fsdp", "mlp": "fsdp"}
    ),
    "expert on two axes, sharded sequence": Mesh(
        shape={"data": 2, "a": 2, "b": 2}, rules={"batch": "data", "seq": "a", "expert": ("a", "b"), "mlp": "b"}
    ),
}
FSDP = Mesh(shape={"fsdp": 8}, rules={"batch": "fsdp", "embed": "fsdp"})
"""A mesh on which experts are sharded only by their features."""
RAGGED = "expert on two axes, sharded sequence"
"""The mesh on which `Exchange` also runs with ragged arrays."""
ROUTINGS = ("random", "four experts", "one expert")


def mixture(dispatch, top_k=2):
    from axcore_moe.experts import Experts
    from axcore_moe.layer import MoE
    from axcore_moe.router import TopK

    biased = Linear.Config(use_bias=True, bias_init=Normal(stddev=0.3))
    block = FeedForward.Config(hidden_dim=HIDDEN, gate=biased, up=biased, down=biased)
    return MoE.Config(
        input_dim=DIM,
        num_experts=EXPERTS,
        experts=Experts.Config(block=block),
        router=TopK.Config(top_k=top_k),
        dispatch=dispatch,
    )


def parameters(shapes, routing):
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: (0.5 * random.normal(size=leaf.shape)).astype(leaf.dtype), shapes)
    weight = params["router"]["linear"]["weight"]
    if routing == "four experts":  # inputs are positive, so these always have the largest logits
        weight[:, 4:] = -np.abs(weight[:, 4:]) - 5
        weight[:, :4] = np.abs(weight[:, :4])
    if routing == "one expert":
        weight[:] = 0  # ties select the first experts
    return params


def tokens(routing):
    x = np.random.default_rng(1).normal(size=(ROWS, SEQ, DIM)).astype(np.float32)
    return np.abs(x) if routing == "four experts" else x


def gradients(cfg, layout):
    """{routing: loss, dropped share and gradients}, the bytes on each device, and the text of the compiled program."""
    fn, shapes, state = abstract(cfg)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)

    def objective(params, x):
        with layout.active():
            (y, collections), _ = fn(params, state, x, training=True)
        dropped = collections.scalars()["dropped"]
        return jnp.square(y).mean() + jnp.sin(y).mean(), dropped

    placed = layout.shardings(shapes, fn.axes), layout.sharding("batch", "seq", None)
    step = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True), in_shardings=placed)
    compiled, found = None, {}
    for routing in ROUTINGS:
        args = jax.device_put((parameters(shapes, routing), tokens(routing)), placed)
        compiled = compiled or step.lower(*args).compile()
        (loss, dropped), (of_params, of_x) = compiled(*args)
        found[routing] = {
            "loss": float(loss),
            "dropped": float(dropped),
            "gradients": {path: np.asarray(leaf) for path, leaf in by_path({"x": of_x, **of_params}).items()},
        }
    held = {
        path: (leaf.nbytes, [shard.data.nbytes for shard in leaf.addressable_shards])
        for path, leaf in by_path(args[0]).items()
    }
    return {**found, "bytes": held, "text": compiled.as_text()}


def lowered(platform, **options):
    """The text of a forward pass for eight devices that do not exist."""
    from axcore_moe.exchange import Exchange

    fn, params, state = abstract(mixture(Exchange(**options)))
    layout = Mesh(shape={"expert": 8}).abstract(8, platform)

    def call(params, state, x):
        with layout.active():
            return fn(params, state, x)[0][0]

    x = jax.ShapeDtypeStruct((ROWS, SEQ, DIM), jnp.float32)
    return (
        jax.jit(call)
        .trace(params, state, x)
        .lower(lowering_platforms=({"gpu": "cuda"}.get(platform, platform),))
        .as_text()
    )


class Amax(ax.Layer):
    """Scales x. Stores the sum of each row and, like delayed scaling, the largest absolute output of the batch."""

    class Config(ax.Layer.Config):
        named: bool = True

    def __init__(self, cfg, *, rngs):
        self.scale = self.param("scale", (DIM,), Normal(stddev=1.0), rngs, axes=("embed",))
        self.amax = GradientState(jnp.zeros(()), axes=())
        self.sums = nnx.Variable(jnp.zeros((ROWS,)), **({"axes": ("batch",)} if cfg.named else {}))

    def __call__(self, x):
        def body(self, x):
            self.sums[...] = jax.lax.psum(x.sum(axis=1), "tensor")
            return recorded(x * self.scale[...], self.amax[...])

        rows = P("data", "tensor")
        return shard_map(body, in_specs=(rows,), out_specs=rows)(self, x)


def recorded(x, amax):
    return custom_vjp(lambda x, amax: x, lambda x, amax: (x, x), lambda x, g: (g, jnp.abs(x).max()))(x, amax)


def remembered():
    """The Variables and gradients of `Amax` when each device has a different part of x."""
    layout = Mesh(shape={"data": 4, "tensor": 2}, rules={"batch": "data", "embed": "tensor"}).make()
    x = np.random.default_rng(2).normal(size=(ROWS, DIM)).astype(np.float32)
    fn, params, state = ax.functional(Amax.Config().build(rngs=ax.Rngs(0)))

    def objective(params, state, x):
        with layout.active():
            (y, _), new = fn(params, state, x)
        return jnp.square(y).sum(), new

    grads, new = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(params, state, x)
    return jax.tree.map(np.asarray, {"x": x, "scale": params["scale"], "gradients": grads, "new": new})


def main():
    from axcore_moe.dispatch import Dense
    from axcore_moe.exchange import Exchange

    one = Mesh(shape={"data": 1}, rules={}).make(jax.devices()[:1])
    found = {"remembered": remembered(), "one": gradients(mixture(Dense()), one)}
    found |= {name: gradients(mixture(Exchange()), mesh.make()) for name, mesh in MESHES.items()}
    found["fsdp=8"] = gradients(mixture(Exchange()), FSDP.make())
    bounded = mixture(Exchange(factor=1.0, dropless=False))
    found["bounded"] = gradients(bounded, MESHES["expert=8"].make())
    jax.lax.ragged_all_to_all, Exchange._is_ragged = emulated, lambda *_: True
    found["ragged"] = gradients(mixture(Exchange()), MESHES[RAGGED].make())
    return found


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all`, which XLA does not implement for CPUs. NaN if the sizes of two devices differ."""
    here, row = jax.lax.axis_index(axis_name), jnp.arange(output.shape[0])
    sent = jax.lax.all_gather((operand, input_offsets, send_sizes, output_offsets), axis_name)
    for source in range(recv_sizes.size):
        rows, first, size, start = sent[0][source], *(each[source, here] for each in sent[1:])
        inside = (row >= start) & (row < start + size)
        values = rows.at[row - start + first].get(mode="fill", fill_value=jnp.nan)
        output = jnp.where(inside[:, None], values, output)
        output = jnp.where(size == recv_sizes[source], output, jnp.nan)
    return output
