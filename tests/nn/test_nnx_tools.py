"""The tools of NNX and JAX on models of axcore. The page docs/nnx.md lists them."""

import pathlib
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType

import axcore as ax
from axcore.module import ContextError
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, Sequence, TransformerLayer
from axcore.nn.attention.reference import ReferenceKernel

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "nnx.md"
ROWS = re.findall(r"^\| (.+?) \| .+? \| `(.+)` \|$", PAGE.read_text(), re.MULTILINE)
IDS = jnp.asarray([[3, 1, 4, 1, 5, 2]])


def config(dropout=0.0):
    attention = Attention.Config(num_heads=2, dropout=dropout, kernel=ReferenceKernel.Config(chunk=4))
    layer = TransformerLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=6), dropout=dropout)
    decoder = Repeat.Config(num_layers=2, layers=layer)
    return ax.pipe(CausalLM.Config(vocab_size=7, dim=4, decoder=decoder, dropout=dropout), ax.use("rope"))


@pytest.fixture(scope="module")
def model():
    return config().build(rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def logits(model):
    return np.asarray(ax.invoke(model, IDS)[0])


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-5)


def loss(model):
    return optax.softmax_cross_entropy_with_integer_labels(model(IDS), IDS).mean()


@pytest.mark.parametrize("example", [pytest.param(code, id=tool.strip("`")) for tool, code in ROWS])
def test_case_8_each_example_of_the_page_runs(example, model, tmp_path):
    model = nnx.clone(model)
    names = {"cfg": config(), "model": model, "ids": IDS, "loss": loss, "folder": tmp_path / "saved"}
    names |= {"ax": ax, "nnx": nnx, "jax": jax, "jnp": jnp, "optax": optax, "ocp": ocp}
    names["step"] = lambda: model.embedding(IDS)  # test_debug_flags.py runs whole steps
    exec(example, names)


def test_case_8_nnx_rngs_initialize_a_model(model):
    key = nnx.Rngs(0).params()
    close(model.embedding.weight[...], config().build(rngs=ax.Rngs(key)).embedding.weight[...])


def test_case_8_a_model_built_from_nnx_rngs_takes_a_new_key_each_time():
    rngs, cfg = nnx.Rngs(0), config().embedding.set(vocab_size=7, output_dim=4)
    first, second = (cfg.build(rngs=rngs).weight[...] for _ in range(2))
    assert not np.allclose(first, second)


def test_case_8_tabulate_lists_every_layer(model, logits):
    table = nnx.tabulate(model, IDS, console_kwargs={"width": 200, "force_terminal": False})
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    found = {row[0]: row[1:] for row in rows if row[1]}
    layer = {f"decoder/layers/{name}" for name in ("attention_norm", "attention", "ffn_norm", "ffn", "ffn/gate")}
    attention = {f"decoder/layers/attention/{name}" for name in ("query", "position", "kernel", "projection")}
    assert layer | attention | {"", "embedding", "decoder/layers", "norm", "head"} <= found.keys()
    assert found["embedding"][1:3] == ["int32[1,6]", "float32[1,6,4]"]
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert found[""][3].startswith(f"{size:,} ")
    close(model(IDS), logits)  # the classes have their own methods again


@pytest.mark.parametrize("kind", ["scanned", pytest.param("unrolled", marks=pytest.mark.slow)])
def test_case_8_train_and_eval_switch_dropout(kind):
    cfg = config(dropout=0.5)
    if kind == "unrolled":
        cfg = cfg.set(decoder=Sequence.Config(layers=(cfg.decoder.layers,) * 2))
    model = cfg.build(rngs=nnx.Rngs(0))
    call = nnx.jit(lambda model: model(IDS))
    model.train()
    first, second = call(model), call(model)
    model.eval()
    evaluated = call(model)
    assert not np.allclose(first, second) and not np.allclose(first, evaluated)
    close(call(model), evaluated)
    close(evaluated, ax.invoke(model, IDS)[0])
    assert not np.allclose(call(nnx.view(model, deterministic=False)), evaluated)


class Pair(ax.Layer):
    """Two dense layers with dropout, as the tests below need them to have separate modes."""

    class Config(ax.Layer.Config):
        block: FeedForward.Config = FeedForward.Config(input_dim=4, hidden_dim=64, dropout=0.5)

    def __init__(self, cfg, *, rngs):
        self.first = self.child("first", cfg.block, rngs)
        self.second = self.child("second", cfg.block, rngs)

    def __call__(self, x):
        return self.first(x), self.second(x)


def test_case_8_the_mode_can_differ_between_layers():
    pair, x = Pair.Config().build(rngs=nnx.Rngs(0)), jnp.ones((1, 4))
    pair.train()
    pair.second.eval()
    expected = ax.invoke(pair, x)[0]
    found = pair(x)
    assert not np.allclose(found[0], expected[0])
    close(found[1], expected[1])


def test_case_a_layer_called_outside_of_invoke_needs_a_mode():
    pair = Pair.Config().build(rngs=ax.Rngs(0))
    with pytest.raises(ContextError, match=r"first \(FeedForward\) was called outside of axcore.invoke.*model.train"):
        pair(jnp.ones((1, 4)))
    pair.train()
    with pytest.raises(
        ContextError, match=r"first \(FeedForward\) drew from .* 'dropout'.* build the model with nnx.Rngs"
    ):
        pair(jnp.ones((1, 4)))


class Jitted(ax.Layer):
    """Applies a transform of NNX to a child."""

    class Config(ax.Layer.Config):
        pass

    def __init__(self, cfg, *, rngs):
        self.block = self.child("block", FeedForward.Config(input_dim=4, hidden_dim=64, dropout=0.5), rngs)

    def __call__(self, x):
        return nnx.jit(lambda block, x: block(x))(self.block, x)


def test_case_8_transforms_of_nnx_evaluate_layers_but_do_not_cache_their_random_bits():
    layer, x = Jitted.Config().build(rngs=nnx.Rngs(0)), jnp.ones((1, 4))
    layer.eval()
    close(layer(x), ax.invoke(layer.block, x)[0])
    layer.train()
    with pytest.raises(
        ContextError, match=r"^FeedForward drew from the PRNG stream 'dropout', but the call has no key"
    ):
        layer(x)


def test_case_8_plain_nnx_optimizers_train(model):
    model = nnx.clone(model)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(40)]
    assert losses[-1] < 0.7 * losses[0]


def test_case_8_split_merge_clone_and_orbax_keep_the_logits(model, logits, tmp_path):
    graphdef, state = nnx.split(model)
    close(nnx.merge(graphdef, state)(IDS), logits)
    close(nnx.clone(model)(IDS), logits)
    assert not nnx.find_duplicates(model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", nnx.state(model, nnx.Param))
        checkpointer.wait_until_finished()
        other = nnx.eval_shape(lambda: config().build(rngs=nnx.Rngs(0)))
        restored = checkpointer.restore(tmp_path / "saved", nnx.state(other, nnx.Param))
    again = config().build(rngs=nnx.Rngs(1))
    nnx.update(again, restored)
    close(again(IDS), logits)


@pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit])
def test_case_8_a_model_runs_inside_a_mesh_context(logits, kind):
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(kind,))):
        close(nnx.jit(lambda model: model(IDS))(config().build(rngs=nnx.Rngs(0))), logits)


def exported(cfg):
    """The function of `cfg`, and the same exported with a symbolic batch and length."""
    fn, params, state = ax.functional(cfg.build(rngs=ax.Rngs(0)))
    run = jax.jit(lambda params, ids: fn(params, state, ids)[0][0])
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, length"), jnp.int32)
    artifact = jax.export.export(run)(params, shape)
    return lambda ids: run(params, ids), lambda ids: artifact.call(params, ids)


@pytest.mark.long
def test_case_8_export_with_a_symbolic_length_computes_the_same():
    run, artifact = exported(config())
    for rows, length in ((1, 4), (2, 9)):  # one chunk of the kernel and three
        ids = jnp.asarray(np.random.default_rng(length).integers(0, 7, (rows, length)))
        close(artifact(ids), run(ids))


@pytest.mark.long
def test_case_8_tree_mode_computes_the_same(logits):
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        model = config().build(rngs=nnx.Rngs(0))
        close(nnx.jit(lambda model: model(IDS))(model), logits)
        gradients = nnx.grad(lambda params, rest: loss(nnx.merge(graphdef, params, rest)))
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        found = gradients(params, rest)
    close(found["embedding"]["weight"][...], nnx.grad(loss)(model)["embedding"]["weight"][...])
