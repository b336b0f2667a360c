"""The planner: formulas compared with compiled steps, the search, and what it prints."""

import dataclasses
import functools
import importlib
import math

import jax
import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.aot import Target, compile_program
from axcore.aot.plan import plan
from axcore.aot.plan.liveness import Sizes, temporaries
from axcore.aot.plan.model import Candidate, Model
from axcore.aot.plan.search import ways
from axcore.parallel import ByTag, Remat

search = importlib.import_module("axcore.aot.plan.search")


@pytest.fixture(scope="module")
def cfg(tiny):
    """The tiny recipe with rows for eight devices."""
    return tiny.set(input=tiny.input.set(batch_size=16))


@pytest.fixture(scope="module")
def found(cfg):
    return plan(cfg, "cpu-8", compiled=0)


@pytest.mark.long
def test_the_table_is_ranked_and_says_why_the_others_lost(found):
    assert found.best is found.choices[0] and not found.best.why
    assert all(choice.why for choice in found.choices[1:])
    times = [choice.figures.step for choice in found.choices]
    assert times == sorted(times) and len(times) == found.tried
    text = str(found)
    assert "best" in text and "slower, bound by" in text and "use_remat(cfg.model, " in text


@pytest.mark.long
def test_the_rule_to_paste_is_the_best_candidate(cfg, found):
    source = "\n".join(line for line in str(found).splitlines() if line.startswith(("def ", "    ")))
    names = {"Remat": Remat, "ByTag": ByTag, "use_remat": ax.nn.use_remat}
    exec(source, names)
    assert names["planned"](cfg) == found.best.candidate.applied(cfg)


@pytest.mark.long
def test_a_batch_that_no_mesh_can_split(cfg):
    with pytest.raises(ax.ConfigError, match="no mesh of cpu-8 can split this model and its batch: the rows"):
        plan(cfg.set(input=cfg.input.set(batch_size=9)), "cpu-8", compiled=0)


@pytest.mark.long
def test_nothing_fits(cfg, monkeypatch):
    monkeypatch.setattr(type(Target.of("cpu-8").chip), "limit", 1000)
    found = plan(cfg, "cpu-8", compiled=1)
    assert found.best is None and str(found).endswith("No candidate fits.")
    assert all(choice.why.startswith("does not fit: ") for choice in found.choices)


@pytest.mark.long
def test_a_candidate_that_the_compiler_refutes_is_not_the_best(cfg, monkeypatch):
    compiled = []

    @dataclasses.dataclass
    class Compiled:
        fits: bool
        headroom: int = -(2**30)
        memory = dataclasses.make_dataclass("Memory", [("total", int)])(2**30)

    def compile_program(cfg, target):
        compiled.append(cfg.mesh.shape)
        return Compiled(fits=len(compiled) > 1)

    monkeypatch.setattr(search, "compile_program", compile_program)
    found = plan(cfg, "cpu-8", compiled=1)
    assert len(compiled) == 2 and found.best.candidate.shape == compiled[1]
    assert any(choice.why == "does not fit when compiled: 1.0 GiB more" for choice in found.choices)


def test_heads_limit_tensor_parallelism(cfg):
    shapes = [shape for shape, _ in ways(cfg, Target.of("cpu-8"))]
    heads = {node.num_kv_heads or node.num_heads for _, node in ax.config.walk(cfg.model) if hasattr(node, "num_heads")}
    assert max(shape.get("tensor", 1) for shape in shapes) <= min(heads)
    assert all(math.prod(shape.values()) == 8 for shape in shapes)


@pytest.mark.long
def test_the_state_scales_with_the_number_of_devices():
    cfg = ax.recipe("llama-1b")
    per_device = []
    for count in (8, 64, 512):
        model = Model(cfg.set(input=cfg.input.set(batch_size=512)), Target.of(f"cpu-{count}"))
        per_device.append(count * model.figures(Candidate({"fsdp": count}, Remat(), 1)).state)
    assert per_device[0] == pytest.approx(12 * 1_104_218_112, rel=1e-4)  # parameters and two moments in float32
    assert per_device == pytest.approx([per_device[0]] * 3, rel=1e-4)


def test_activations_of_a_stack_and_of_one_layer_by_hand():
    layers, rows, dim, hidden = 6, 13, 8, 32
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((layers, dim, hidden), (layers, hidden, dim))]

    def loss(weights, x):
        @jax.checkpoint
        def layer(x, weights):
            return jnp.sin(x @ weights[0]) @ weights[1], None

        return jax.lax.scan(layer, x, weights)[0].sum()

    x = jax.ShapeDtypeStruct((rows, dim), "float32")
    jaxpr = jax.make_jaxpr(jax.grad(loss))(tuple(shapes), x)
    found = temporaries(jaxpr, Sizes(rows=13, per_device=26, share=1 / 2, tensor=1, dim=dim))
    inputs, wide, narrow = layers * 26 * dim * 4, 26 * hidden * 4, 26 * dim * 4
    # The gradients are results, so they are donated. Alive in the backward pass of a layer: the inputs of all layers,
    # its gathered weights, and at most three arrays of hidden features and three of features, with the new gradients.
    gathered = 2 * dim * hidden * 4
    assert inputs + gathered + 2 * wide < found < inputs + 2 * gathered + 3 * wide + 4 * narrow


@pytest.mark.slow
def test_memory_agrees_with_the_compiler(tiny):
    cfg = tiny.set(input=tiny.input.set(batch_size=64))
    candidate = Candidate({"data": 1}, None, 1)
    expected = compile_program(candidate.applied(cfg), "cpu-1").memory.total
    assert Model(cfg, Target.of("cpu-1")).figures(candidate).total == pytest.approx(expected, rel=0.3)


def test_an_unrolled_stack_keeps_only_operands_and_results_of_products():
    layers, rows, dim = 6, 13, 8
    weights = jax.ShapeDtypeStruct((layers, dim, dim), "float32")

    def loss(weights, x, unroll):
        return jax.lax.scan(lambda x, weight: (jnp.sin(jnp.cos(x @ weight)), None), x, weights, unroll=unroll)[0].sum()

    def found(unroll):
        grad = jax.grad(functools.partial(loss, unroll=unroll))
        jaxpr = jax.make_jaxpr(grad)(weights, jax.ShapeDtypeStruct((rows, dim), "float32"))
        return temporaries(jaxpr, Sizes(rows=13, per_device=13, share=0, tensor=1, dim=dim))

    one = rows * dim * 4
    # Scanned: stacks of the input and of two derivatives. Unrolled: the operand and the result of each product.
    assert 2 * layers * one <= found(unroll=layers) <= (2 * layers + 4) * one < 3 * layers * one <= found(unroll=1)
