"""Contract 4: grouped weights have the slots of linear maps, so adapters and stored codes attach to experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract, functional
from axcore.nn import Blocks, Grouped, GroupedLinear, Linear, RaggedDot
from axcore.numerics import Numerics, stored
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.models import by_path, objective
from axcore_lora import DoRA, LoRA, merge, unmerge

pytestmark = pytest.mark.long

GROUPS, INPUT, OUTPUT, ROWS = 3, 6, 5, 16
SIZES = (4, 0, 12)
RANK = 2
ADAPTERS = {
    "plain": None,
    "lora": LoRA.Config(rank=RANK, alpha=3.0),
    "dora": DoRA.Config(rank=RANK, alpha=3.0),
}


class Codes(Numerics):
    """int8 codes and a scale for each output."""

    def encode(self, weight):
        scales = jnp.abs(weight).max(self.config.input_axis, keepdims=True).astype(jnp.float32) / 127
        return {"codes": jnp.round(weight / scales).astype(jnp.int8), "scales": scales}

    def decode(self, stored):
        return stored["codes"] * stored["scales"]


def built(adapter, **options):
    """(config, function, normally distributed parameters)."""
    cfg = GroupedLinear.Config(
        groups=GROUPS, input_dim=INPUT, output_dim=OUTPUT, use_bias=True, adapter=ADAPTERS[adapter], **options
    )
    fn, shapes, _ = abstract(cfg)
    rng = np.random.default_rng(0)
    return cfg, fn, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes)


def separate(cfg, params, x):
    """Applies a separate `Linear` to the rows of each group."""
    one = Linear.Config(input_dim=INPUT, output_dim=OUTPUT, use_bias=True, adapter=cfg.adapter)
    fn, _, state = functional(one.build(rngs=ax.Rngs(0)))
    of = lambda group: jax.tree.map(lambda leaf: leaf[group], params)  # noqa: E731
    parts = jnp.split(x, np.cumsum(SIZES)[:-1]) if x.ndim == 2 else x
    outputs = [fn(of(group), state, part)[0][0] for group, part in enumerate(parts)]
    return jnp.concatenate(outputs) if x.ndim == 2 else jnp.stack(outputs)


def groups_in(way):
    block = {"rows": 1, "blocks": 4}[way]
    of_block = np.repeat(np.arange(GROUPS, dtype=np.int32), np.array(SIZES) // block)
    matmul = RaggedDot() if block == 1 else Blocks(size=block)
    return Grouped(jnp.asarray(SIZES, jnp.int32), jnp.asarray(of_block), ROWS, matmul)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("way", ["rows", "blocks", "batched"])
def test_values_and_gradients_equal_separate_linear_maps(way, adapter):
    cfg, fn, params = built(adapter)
    shape = (GROUPS, 4, INPUT) if way == "batched" else (ROWS, INPUT)
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)

    def mine(params, x):
        if way == "batched":
            return fn(params, {}, x, method="batched")[0][0]
        return fn(params, {}, x, groups_in(way), method="grouped")[0][0]

    def theirs(params, x):
        return separate(cfg, params, x)

    expected = theirs(params, x)
    weights = np.random.default_rng(2).normal(size=expected.shape)
    gradients = [
        jax.jit(jax.grad(lambda params, x, f=f: (f(params, x) * weights).sum(), argnums=(0, 1)))(params, x)
        for f in (mine, theirs)
    ]
    np.testing.assert_allclose(mine(params, x), expected, rtol=1e-5, atol=1e-5)
    found, wanted = (by_path(gradient) for gradient in gradients)
    for path, leaf in wanted.items():
        assert np.any(leaf), path
        np.testing.assert_allclose(found[path], leaf, rtol=1e-4, atol=1e-4, err_msg=path)


def test_grouped_of_assigns_rows_to_groups_by_size():
    found = Grouped.of(jnp.asarray(SIZES, jnp.int32), ROWS)
    np.testing.assert_array_equal(found.group, np.repeat(np.arange(GROUPS), SIZES))
    np.testing.assert_array_equal(found.broadcast(jnp.arange(6.0).reshape(3, 2))[:, 0], np.repeat([0, 2, 4], SIZES))


def test_each_group_is_initialized_like_a_separate_linear():
    cfg = GroupedLinear.Config(groups=50, input_dim=64, output_dim=32)
    weight = functional(cfg.build(rngs=ax.Rngs(0)))[1]["weight"]
    np.testing.assert_allclose(weight.std(axis=(1, 2)), 1 / 8, rtol=0.1)  # the fan-in is 64, not 50 * 64
    assert len({float(each) for each in weight[:, 0, 0]}) == 50


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_matrix_equals_the_matrix_applied_to_rows(adapter):
    _, fn, params = built(adapter)
    x = np.random.default_rng(1).normal(size=(GROUPS, 4, INPUT)).astype(np.float32)
    matrix = fn(params, {}, method="matrix")[0][0]
    expected = fn(params, {}, x, method="batched")[0][0] - params["bias"][:, None]
    np.testing.assert_allclose(jnp.einsum("gni,gio->gno", x, matrix), expected, rtol=1e-4, atol=1e-5)


def test_weights_biases_codes_and_adapters_have_the_group_axis():
    cfg, _, _ = built("dora", axes=("expert", "embed", "mlp"), numerics=Codes.Config(stored=True))
    axes = abstract(cfg)[0].axes
    assert axes["weight"] == {"codes": ("expert", "embed", "mlp"), "scales": ("expert", None, "mlp")}
    assert axes["bias"] == ("expert", "mlp")
    adapter = {"a": ("expert", "embed", None), "b": ("expert", None, "mlp"), "magnitude": ("expert", "mlp")}
    assert axes["adapter"] == adapter


def test_an_adapter_without_group_support_is_rejected():
    cfg = GroupedLinear.Config(groups=2, input_dim=3, output_dim=4, adapter=Linear.Config())
    with pytest.raises(ax.ConfigError, match=r"adapter=.* has no field 'groups'"):
        cfg.build(rngs=ax.Rngs(0))
    with pytest.raises(ax.ConfigError, match=r"axes=.*grouped weights have three axes"):
        GroupedLinear.Config.of(Linear.Config(axes=("embed", "mlp")))


def mixture():
    return ax.pipe(tiny_model(), ax.use("moe", num_experts=4))


UP = "decoder.layers.ffn.experts.up"


@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["lora", "dora"])
def test_lora_attaches_to_experts_learns_and_merges(dora):
    cfg = ax.pipe(mixture(), ax.use("lora", rank=RANK, dora=dora, where="**.experts.block.*"))
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    assert by_path(params)[f"{UP}.adapter.a"].shape == (2, 4, 16, RANK)
    assert by_path(params)[f"{UP}.adapter.b"].shape == (2, 4, RANK, 24)
    plain, form, other = abstract(mixture())
    other = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), other)
    ids = tiny_batch()["inputs"]
    base = {path: leaf for path, leaf in by_path(params).items() if ".adapter." not in path}
    assert base.keys() == by_path(form).keys()

    gradient = jax.jit(jax.grad(lambda params: objective(fn, params, state, tiny_batch())))(params)
    for path in (f"{UP}.adapter.b", "decoder.layers.ffn.experts.down.adapter.b"):
        assert (np.abs(by_path(gradient)[path]).max(axis=(2, 3)) > 0).any(axis=1).all(), path

    rng = np.random.default_rng(0)
    moved = jax.tree.map_with_path(
        lambda path, leaf: (
            leaf + 0.1 * rng.normal(size=leaf.shape).astype(leaf.dtype)
            if "adapter" in jax.tree_util.keystr(path)
            else leaf
        ),
        params,
    )
    merged = merge(cfg, moved)
    assert merged.cfg == mixture()
    logits = jax.jit(lambda params: fn(params, state, ids)[0][0])
    expected = np.asarray(logits(moved))
    found = jax.jit(lambda params: plain(params, other, ids)[0][0])(merged.params)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    assert np.abs(expected - logits(params)).max() > 0.01
    back = unmerge(cfg, merged.params, merged.kept)
    for path, leaf in by_path(moved).items():
        np.testing.assert_allclose(by_path(back)[path], leaf, rtol=1e-4, atol=1e-4, err_msg=path)


def test_adapters_train_over_experts_that_are_stored_in_int8():
    cfg = ax.pipe(mixture(), ax.use("lora", rank=RANK, where="**.experts.block.*"))
    cfg = ax.select(cfg, "**.experts.block.*").set(numerics=Codes.Config())
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    model, codes = stored(cfg, params)
    kept = functional(model.build(rngs=ax.Rngs(0)))[0]
    assert by_path(codes)[f"{UP}.weight.codes"].dtype == jnp.int8
    assert f"{UP}.adapter.a" in by_path(codes)

    def loss(adapters):
        whole = {path: adapters.get(path, leaf) for path, leaf in by_path(codes).items()}
        return objective(kept, jax.tree.unflatten(jax.tree.structure(codes), list(whole.values())), state, tiny_batch())

    adapters = {path: leaf for path, leaf in by_path(codes).items() if ".adapter." in path}
    gradients = jax.jit(jax.grad(loss))(adapters)
    exact = by_path(jax.jit(jax.grad(lambda params: objective(fn, params, state, tiny_batch())))(params))
    found, expected = gradients[f"{UP}.adapter.b"], exact[f"{UP}.adapter.b"]
    assert 0 < np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)
    with pytest.raises(ax.AxcoreError, match=r"experts\.\w+\.weight is stored as codes, scales.*Merge first"):
        merge(model, codes)
