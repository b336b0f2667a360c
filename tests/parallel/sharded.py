"""Runs `shard_map` of functions that call layers on the available devices and prints the results as JSON."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import axcore as ax
from axcore.module import Reduce, functional, invoke, remat
from axcore.parallel import Mesh, shard_map

from ..module.layers import Parent, Plain, Stacked

X = np.linspace(0.5, 2.0, 32).reshape(8, 4).astype(np.float32)
KEY = jax.random.key(7)


def holder(run, child):
    class Holder(Parent):
        def __call__(self, x):
            return run(self, x)

    return Holder.Config(children=(("inner", child),))


LAYOUT = Mesh(shape={"data": 4, "tensor": 2}, rules={"mlp": "tensor", "batch": "data", "embed": "data"})
"""`embed` is the logical axis of the parameters in `module/layers.py`."""


def layout():
    return LAYOUT.make()


def over_rows(fn):
    rows = P(("data", "tensor"))
    return shard_map(fn, layout=layout(), in_specs=(rows,), out_specs=rows, gather=("data", "tensor"))


def over_features(fn):
    """Gathers no parameters: each device computes the features of its shard."""
    spec = P("tensor", "data")
    return shard_map(fn, layout=layout(), in_specs=(spec,), out_specs=spec)


def call(layer, x):
    return layer(x)


def reports(self, x):
    for rule in Reduce:
        self.add_summary(rule.value, x.sum(), rule)
    self.add_histogram("histogram", x)
    return x


def draw(self, x):
    return jax.random.key_data(self.rng("a"))[None]


def measure(cfg):
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))

    def objective(params, x):
        (output, collections), _ = fn(params, state, x, key=KEY, training=True)
        return jnp.sum(output**2) + collections.total_loss(), (output, collections)

    (value, (output, collections)), grads = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(
        params, X
    )
    found = {"value": value, "output": output, "gradients": jax.tree.leaves(grads)}
    found["summaries"] = {path: summary.value for path, summary in collections.summaries.items()}
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), {**found, "losses": collections.weighted_losses()})


def message(run, child=None, **options):
    child = child or Plain.Config(width=4)
    model = Parent.Config(children=(("top", holder(run, child)),)).build(rngs=ax.Rngs(0))
    try:
        invoke(model, "top", X, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


RUNS = {
    "plain": lambda self, x: self.inner(x),
    "child": lambda self, x: over_rows(call)(self.inner, x),
    "self": lambda self, x: over_rows(lambda self, x: self.inner(x))(self, x),
    "own shards": lambda self, x: over_features(call)(self.inner, x),
    "in remat": lambda self, x: remat(lambda self, x: over_rows(call)(self.inner, x))(self, x),
    "of remat": lambda self, x: over_rows(lambda self, x: remat(call)(self.inner, x))(self, x),
}


def results():
    child = Plain.Config(width=4, summary=True, loss_weight=0.3)
    found = {name: measure(holder(run, child)) for name, run in RUNS.items()}
    found |= {
        f"stacked {name}": measure(Stacked.Config(layer=holder(RUNS[name], child), count=2))
        for name in ("plain", "self", "own shards")
    }
    model = holder(lambda self, x: over_rows(reports)(self, x), child).build(rngs=ax.Rngs(0))
    summaries = invoke(model, X)[1].summaries
    found["rules"] = {path: np.asarray(summary.value).tolist() for path, summary in summaries.items()}

    def draws(self, x):
        rows = [draw(self, x), over_rows(draw)(self, x), over_rows(draw)(self, x), draw(self, x)]
        return jnp.concatenate([jax.device_put(row, jax.sharding.NamedSharding(layout().mesh, P())) for row in rows])

    model = holder(draws, child).build(rngs=ax.Rngs(0))
    found["draws"] = np.asarray(jax.jit(lambda x: invoke(model, x, key=KEY)[0])(X)).tolist()
    found["draws without jit"] = np.asarray(invoke(model, X, key=KEY)[0]).tolist()
    foreign = Plain.Config(width=4).build(rngs=ax.Rngs(0))
    found["messages"] = {
        "foreign module": message(lambda self, x: over_rows(call)(foreign, x)),
        "written": message(RUNS["self"], Plain.Config(width=4, counts=True)),
        "no layout": message(lambda self, x: shard_map(call, in_specs=(P(),), out_specs=P())(self.inner, x)),
        "nested": message(lambda self, x: over_rows(lambda self, x: over_rows(call)(self.inner, x))(self, x)),
        "gathers": message(
            lambda self, x: shard_map(call, layout=layout(), in_specs=(P(),), out_specs=P(), gather=("fsdp",))(
                self.inner, x
            )
        ),
        "not divisible": message(lambda self, x: over_features(call)(self.inner, x), Plain.Config(width=6)),
        "captured": message(RUNS["self"], capture=["**.inner"]),
    }
    return found
