"""The planner: formulas compared with compiled steps, the search, and what it prints."""

import functools
import importlib
import math
import types

import jax
import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.aot import Target, compile_program
from axcore.aot.plan import depth, plan
from axcore.aot.plan.depth import deep, with_repetitions
from axcore.aot.plan.liveness import Sizes, temporaries
from axcore.aot.plan.model import BatchNotDivisible, Candidate, Figures, Model
from axcore.aot.plan.search import Choice, Plan, Search, ways
from axcore.nn import layers_of
from axcore.parallel import ByKind, ByTag, Remat
from axcore.plugin import MeshRule


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
    assert {choice.source for choice in found.choices} == {"formula"}


@pytest.mark.parametrize(
    "remat", [None, Remat(), ByTag(save=("heads", "lse")), ByKind(kinds={"MoE": Remat()}, others=ByTag(save=("lse",)))]
)
def test_the_rule_to_paste_runs_as_printed_and_is_the_candidate(cfg, remat):
    best = Choice(Candidate({"data": 2, "fsdp": 4}, remat, 2, unroll=True), Figures(*[1.0] * 9), 0.0, "formula")
    text = str(Plan("cpu-8", "tiny", 1, [best], 1, {}))
    offer = next(line for line in text.splitlines() if line.startswith("MeshRule("))
    rule = eval(offer, {"MeshRule": MeshRule})
    assert (rule.pattern, rule.recipe, rule.target) == ("cpu-8", "tiny", "my_plugin.rules:planned")
    module = {}
    exec(text.partition("# rules.py\n")[2], module)
    assert module["planned"](cfg) == best.candidate.applied(cfg)


@pytest.mark.long
def test_a_batch_that_no_mesh_can_split(cfg):
    with pytest.raises(ax.ConfigError, match="no mesh of cpu-8 can split this model and its batch of 9 rows: the rows"):
        plan(cfg.set(input=cfg.input.set(batch_size=9, seq_len=63)), "cpu-8", compiled=0)


def test_what_cannot_be_split_is_told_by_the_type_of_the_error(cfg, monkeypatch):
    errors = iter([BatchNotDivisible("the batch"), ax.ConfigError("its dimension 'rows'"), BatchNotDivisible("tokens")])

    def refuses(_):
        raise next(errors)

    search = Search(cfg, Target.of("cpu-8"))
    monkeypatch.setattr(search.model, "figures", refuses)
    search.run([Candidate({"fsdp": 8}, None, count) for count in (1, 2, 4)], 0)
    assert search.refused == {"the rows of a batch cannot be split so": 2, "a parameter cannot be split so": 1}


@pytest.mark.long
def test_nothing_fits(cfg, monkeypatch):
    monkeypatch.setattr(type(Target.of("cpu-8").chip), "limit", 1000)
    found = plan(cfg, "cpu-8", compiled=1)
    assert found.best is None and str(found).endswith("No candidate fits.")
    assert all(choice.why.startswith("does not fit: ") for choice in found.choices)
    assert any("context" in choice.candidate.shape for choice in found.choices)


@pytest.mark.long
def test_rows_that_several_devices_must_share(cfg):
    found = plan(cfg.set(input=cfg.input.set(batch_size=1)), "cpu-8", compiled=0)
    assert {choice.candidate.shape.get("context", 1) for choice in found.choices} >= {8}
    assert all(choice.candidate.rows_over == 1 for choice in found.choices)


def compiler(monkeypatch, memory):
    """Replaces the compiler. `memory(cfg)`: bytes of a step. Returns the list of compiled configs."""
    compiled = []

    def compile_program(cfg, target):
        compiled.append(cfg)
        return types.SimpleNamespace(memory=types.SimpleNamespace(total=memory(cfg)))

    for name in ("search", "depth"):
        module = importlib.import_module(f"axcore.aot.plan.{name}")
        monkeypatch.setattr(module, "compile_program", compile_program)
    return compiled


@pytest.mark.long
def test_a_candidate_that_the_compiler_refutes_is_not_the_best(cfg, monkeypatch):
    limit = Target.of("cpu-8").chip.limit
    compiled = compiler(monkeypatch, lambda cfg: 2 * limit if len(compiled) == 1 else limit / 4)
    found = plan(cfg, "cpu-8", compiled=1)
    assert len(compiled) == 2
    assert (found.best.source, found.best.memory) == ("compiled", limit / 4)
    assert found.best.candidate.applied(cfg) == compiled[1]
    assert all(choice.candidate.applied(cfg) != compiled[0] for choice in found.choices if not choice.why)


@pytest.mark.long
def test_a_compiled_candidate_corrects_those_of_its_kind(cfg, monkeypatch):
    search = Search(cfg, Target.of("cpu-8"))
    first = search.choice(Candidate({"data": 2, "fsdp": 4}, Remat(), 1))
    compiler(monkeypatch, lambda _: first.figures.state + 3 * first.figures.temporaries)
    search.measure(first)
    assert search.choice(first.candidate).source == "compiled"
    for shape, remat in (({"fsdp": 8}, Remat()), ({"data": 2, "fsdp": 2, "tensor": 2}, Remat()), ({"data": 8}, None)):
        assert search.choice(Candidate(shape, remat, 1)).source == "formula"
    for shape, count in (({"data": 2, "fsdp": 4}, 2), ({"data": 4, "fsdp": 2}, 1), ({"data": 8}, 1)):
        other = search.choice(Candidate(shape, Remat(), count))
        assert other.source == "scaled"
        assert other.memory - other.figures.state == pytest.approx(3 * other.figures.temporaries)


@pytest.mark.long
def test_the_largest_compiled_candidate_of_a_kind_scales_the_others(cfg, monkeypatch):
    cfg = cfg.set(input=cfg.input.set(batch_size=32))
    search = Search(cfg, Target.of("cpu-8"))
    whole, half, quarter = (search.choice(Candidate({"fsdp": 8}, Remat(), count)) for count in (1, 2, 4))
    assert whole.figures.temporaries > half.figures.temporaries
    for factors in ({whole: 1.5, half: 3.0}, {half: 3.0, whole: 1.5}):
        search = Search(cfg, Target.of("cpu-8"))
        for choice, factor in factors.items():
            figures = choice.figures
            compiler(monkeypatch, lambda _, f=figures, factor=factor: f.state + factor * f.temporaries)
            search.measure(choice)
        found, other = search.choice(quarter.candidate), search.choice(Candidate({"data": 2, "fsdp": 4}, Remat(), 1))
        assert (found.source, other.source) == ("scaled", "formula")
        assert found.memory == pytest.approx(found.figures.state + 1.5 * found.figures.temporaries)


@pytest.mark.long
def test_a_candidate_that_the_compiler_cannot_compile_is_left_out(cfg, monkeypatch):
    def refuses(cfg):
        raise ax.AxcoreError("no such kernel")

    compiler(monkeypatch, refuses)
    found = plan(cfg, "cpu-8", compiled=1)
    assert found.refused["no such kernel"] == 4 and "left out: 4 because no such kernel" in str(found)


def test_heads_limit_tensor_parallelism(cfg):
    shapes = [each.shape for each in ways(cfg, Target.of("cpu-8"))]
    heads = {node.num_kv_heads or node.num_heads for _, node in ax.config.walk(cfg.model) if hasattr(node, "num_heads")}
    assert max(shape.get("tensor", 1) for shape in shapes) <= min(heads)
    assert all(math.prod(shape.values()) == 8 for shape in shapes)


def test_experts_limit_expert_parallelism(cfg):
    def sizes(experts):
        return {each.shape.get("expert", 1) for each in ways(cfg, Target.of("cpu-8"), experts)}

    assert sizes(0) == {1} and sizes(6) == {1, 2} and sizes(16) == {1, 2, 4, 8}


def test_a_candidate_sets_unrolling_and_optimizer_memory(cfg):
    made = Candidate({"fsdp": 8}, Remat(), 4, unroll=True, offload=True).applied(cfg)
    stack = next(node for _, node in ax.config.walk(made.model) if isinstance(node, ax.nn.Repeat.Config))
    assert (stack.unroll, stack.remat) == (stack.num_layers, Remat())
    assert (made.mesh.shape, made.mesh.optimizer_memory, made.microbatches) == ({"fsdp": 8}, "host", 4)


@pytest.mark.long
def test_moments_in_host_memory_are_not_on_the_device(cfg):
    model = Model(cfg, Target.of("gpu-h100-8"))
    device, host = (model.figures(Candidate({"fsdp": 8}, None, 1, offload=each)) for each in (False, True))
    assert host.state == pytest.approx(device.state / 3, rel=0.01)  # parameters, without two moments
    assert device.host == 0 and host.host == pytest.approx(2 * (device.state - host.state) / 57e9)


class Layers(ax.nn.Stack):
    """A stack that cannot have fewer layers."""

    class Config(ax.nn.Stack.Config):
        layers: tuple[ax.Layer.Config, ...]

        def places(self):
            return tuple(ax.nn.Place(f"layers.{number}", (), layer) for number, layer in enumerate(self.layers))

        def restack(self, layers):
            raise ax.ConfigError("the layers are fixed")


A, B = (ax.nn.TransformerLayer.Config(residual_scale=scale) for scale in (1.0, 2.0))


@pytest.mark.parametrize(
    ("decoder", "stacks", "shallow"),
    [
        (ax.nn.stacked([A] * 12), {"": 12}, [A] * 4),
        (ax.nn.stacked([A, B] * 12), {"": 12}, [A, B] * 4),
        (ax.nn.Sequence.Config(layers=(A, A, B) * 9), {"": 9}, [A, A, B] * 4),
        (ax.nn.stacked([A] * 20 + [B] * 30), {".layers.0": 20, ".layers.1": 30}, [A] * 4 + [B] * 4),
        (ax.nn.stacked([A] + [B] * 9), {".layers.1": 9}, [A] + [B] * 4),
    ],
)
def test_stacks_of_every_kind_with_fewer_layers(decoder, stacks, shallow):
    model = ax.nn.CausalLM.Config(dim=8, decoder=decoder)
    expected = {f"decoder{path}": count for path, count in stacks.items()}
    assert deep(model) == expected
    found = with_repetitions(model, dict.fromkeys(expected, 4)).decoder
    assert [place.config for place in layers_of(found)] == shallow


@pytest.mark.parametrize("decoder", [ax.nn.stacked([A] * 8), Layers.Config(layers=(A,) * 12)])
def test_stacks_that_are_compiled_whole(decoder):
    assert deep(ax.nn.CausalLM.Config(dim=8, decoder=decoder)) == {}


def test_memory_from_few_layers_is_exact_if_each_stack_adds_the_same_bytes(cfg, monkeypatch):
    layers = ax.nn.stacked([A] * 20 + [B] * 30)
    deep_cfg = cfg.set(model=cfg.model.set(decoder=layers))

    def counts(cfg):
        return [part.num_layers for part in cfg.model.decoder.layers]

    def formula(cfg):
        return max(1000, 60 * counts(cfg)[0])  # the largest sum is in another place in deep models

    compiled = compiler(monkeypatch, lambda cfg: formula(cfg) + 100 + 7 * counts(cfg)[0] + 3 * counts(cfg)[1])
    figures = lambda cfg: types.SimpleNamespace(figures=lambda _: types.SimpleNamespace(total=formula(cfg)))  # noqa: E731
    monkeypatch.setattr(depth, "Model", lambda cfg, target: figures(cfg))
    candidate = Candidate({"data": 1}, None, 1, unroll=True)
    found = depth.memory_from_few_layers(deep_cfg, Target.of("cpu-1"), candidate, formula(deep_cfg))
    assert found == pytest.approx(60 * 20 + 100 + 7 * 20 + 3 * 30)
    assert [counts(each) for each in compiled] == [[4, 4], [8, 4], [4, 8]]


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
