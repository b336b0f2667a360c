"""Merging and unmerging adapters, and extracting and loading them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import FeedForward, Linear, Repeat, Sequence, TransformerLayer
from axcore.plugin import Command, registry, resolve
from axcore.testing.models import by_path, tiny_batch, tiny_model
from axcore.train import ModelFolder, Trainer, save_model
from axcore.train.checkpoint.model_folder import flat, like
from axcore_lora import adapters, load, merge, unmerge

pytestmark = pytest.mark.long

KINDS = pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
RANK, ALPHA = 2, 5.0


def model(dora, where=Linear, base=None):
    return ax.pipe(base or tiny_model(), ax.use("lora", rank=RANK, alpha=ALPHA, dora=dora, where=where))


def trained(cfg, seed=0, size=0.3):
    """Parameters as after training: no adapter is zero."""
    rng = np.random.default_rng(seed)

    def filled(path, leaf):
        name = path[-1].key
        spread = size if name in ("b", "magnitude") else max(leaf.shape[-2:-1], default=1) ** -0.5
        return (rng.normal(size=leaf.shape) * spread + (name == "scale")).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(filled, abstract(cfg)[1])


def logits(cfg, params):
    fn, _, state = abstract(cfg)
    return np.asarray(jax.jit(lambda params: fn(params, state, tiny_batch()["inputs"])[0][0])(params))


def without_adapters(params):
    return {
        name: without_adapters(part) if isinstance(part, dict) else part
        for name, part in params.items()
        if name != "adapter"
    }


def copied(params):
    return jax.tree.map(np.array, params)


def assert_equal(found, expected, **tolerance):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for path, leaf in by_path(expected).items():
        np.testing.assert_allclose(by_path(found)[path], leaf, err_msg=path, **tolerance)


@KINDS
def test_merged_model_matches_the_adapted_model(dora):
    cfg = model(dora)
    params = trained(cfg)
    before, kept_params = logits(cfg, params), copied(params)
    merged = merge(cfg, params)
    assert merged.cfg == tiny_model()
    assert jax.tree.map(jnp.shape, merged.params) == jax.tree.map(jnp.shape, abstract(merged.cfg)[1])
    np.testing.assert_allclose(logits(*merged[:2]), before, rtol=1e-4, atol=1e-4)
    without = load(params, jax.tree.map(np.zeros_like, adapters(params)))
    assert np.abs(logits(cfg, without) - before).max() > 0.1  # the adapters matter
    assert_equal(params, kept_params, rtol=0)  # the arguments are not modified


def test_case_a_command_merges_the_adapters_of_a_run(tmp_path, capsys):
    cfg = Trainer.Config(model=model(dora=False, where="decoder.layers.ffn.up"), steps=1)
    cfg = cfg.set(learner=cfg.learner.set(rates={"**": 0.0, "**.adapter.**": 1.0}))
    params = trained(cfg.model)
    save_model(tmp_path / "run", cfg, params)
    command, offer = registry().find(Command, "merge")
    assert resolve(command, offer)([str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    assert "merged the adapters of" in capsys.readouterr().out
    found, (_, shapes, _) = ModelFolder.open(tmp_path / "merged"), abstract(tiny_model())
    assert found.cfg == Trainer.Config(model=tiny_model(), steps=1)
    arrays, missing, extra = found.load(found.model, flat(shapes), {})
    assert not missing and not extra
    assert_equal(like(shapes, arrays), merge(cfg.model, params).params, rtol=0)
    with pytest.raises(ax.ConfigError, match="the config has no LoRA or DoRA adapter"):
        resolve(command, offer)([str(tmp_path / "merged"), str(tmp_path / "again")])
    with pytest.raises(ax.AxcoreError, match="merged already exists"):  # before anything is read
        resolve(command, offer)([str(tmp_path / "absent"), str(tmp_path / "merged")])


def merged_by_hand(params, scales=None):
    """Merges every adapter by its formula in float64, one matrix at a time. `scales` maps A's rank to alpha / rank."""
    if "adapter" not in params:
        deeper = {name: part for name, part in params.items() if isinstance(part, dict)}
        return {**params, **{name: merged_by_hand(part, scales) for name, part in deeper.items()}}
    w, adapter = np.array(params["weight"], np.float64), params["adapter"]
    s = (scales or {RANK: ALPHA / RANK})[adapter["a"].shape[-1]]
    for index in np.ndindex(w.shape[:-2]):
        a, b = (np.asarray(adapter[name][index], np.float64) for name in "ab")
        norm = np.linalg.norm(w[index], axis=0)
        w[index] += s * a @ b
        if "magnitude" in adapter:
            w[index] *= norm * (1 + adapter["magnitude"][index]) / np.linalg.norm(w[index], axis=0)
    return {**{name: part for name, part in params.items() if name != "adapter"}, "weight": w}


@KINDS
def test_merged_weights_match_the_formula(dora):
    cfg = model(dora)
    params = trained(cfg)
    assert_equal(merge(cfg, params).params, merged_by_hand(params), rtol=1e-5, atol=1e-6)


@KINDS
def test_unmerge_restores_weights_and_adapters(dora):
    cfg = model(dora)
    params = trained(cfg)
    merged = merge(cfg, params)
    back = unmerge(cfg, merged.params, merged.kept)
    assert_equal(back, params, rtol=1e-5, atol=1e-5)
    assert_equal(adapters(back), adapters(params), rtol=0)


@KINDS
def test_bfloat16_weights_are_rounded_once(dora):
    cfg = model(dora, base=tiny_model().set(dtypes=ax.DTypes(param=jnp.bfloat16)))
    params = trained(cfg)
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)
    merged = merge(cfg, params)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(merged.params))
    exact = merge(cfg, wide).params
    assert_equal(merged.params, jax.tree.map(lambda leaf: np.asarray(leaf, jnp.bfloat16), exact), rtol=2**-7, atol=1e-6)
    assert_equal(unmerge(cfg, merged.params, merged.kept), params, rtol=0, atol=2**-6)


@KINDS
def test_merge_changes_only_adapted_weights(dora):
    cfg = model(dora, where="**.query")
    params = trained(cfg)
    merged = merge(cfg, params)
    moved = {path for path, leaf in by_path(merged.params).items() if leaf is not by_path(params)[path]}
    assert moved == {"decoder.layers.attention.query.weight"}
    assert_equal(merged.params, merged_by_hand(params), rtol=1e-5, atol=1e-6)


@KINDS
def test_groups_of_layers_with_different_ranks(dora):
    layer = tiny_model().decoder.layers
    base = tiny_model().set(decoder=Repeat.Config(num_layers=2, layers=Sequence.Config(layers=(layer, layer))))
    cfg = model(dora, base=base)
    cfg = ax.pipe(cfg, ax.use("lora", rank=4, alpha=1.0, where="decoder.layers.layers.1.**"))
    params = trained(cfg)
    merged = merge(cfg, params)
    assert merged.cfg == base
    assert_equal(merged.params, merged_by_hand(params, {RANK: ALPHA / RANK, 4: 0.25}), rtol=1e-5, atol=1e-6)
    assert_equal(unmerge(cfg, merged.params, merged.kept), params, rtol=1e-4, atol=1e-4)


class Experts(ax.Layer):
    """Feed-forward experts in one stack, as in a mixture of experts."""

    class Config(ax.Layer.Config):
        input_dim: int = ax.REQUIRED
        bank: FeedForward.Config = FeedForward.Config(hidden_dim=12)  # named differently from the attribute

    def __init__(self, cfg, *, rngs):
        build = lambda rngs: self.build_child(cfg.bank, rngs, input_dim=cfg.input_dim)  # noqa: E731
        self.experts = ax.stack(build, rngs.at("experts"), 3)

    def __call__(self, x):
        return ax.scan(self.experts, x, count=3)


@KINDS
def test_stacked_experts_inside_stacked_layers(dora):
    base = tiny_model()
    base = ax.select(base, TransformerLayer).set(ffn=Experts.Config())
    cfg = model(dora, where="**.ffn.bank.**", base=base)
    params = trained(cfg)
    assert params["decoder"]["layers"]["ffn"]["experts"]["gate"]["adapter"]["a"].shape == (2, 3, 16, RANK)
    merged = merge(cfg, params)
    assert merged.cfg == base
    assert_equal(merged.params, merged_by_hand(params), rtol=1e-5, atol=1e-6)
    assert_equal(unmerge(cfg, merged.params, merged.kept), params, rtol=1e-4, atol=1e-4)


@KINDS
def test_merging_can_be_jitted(dora):
    cfg = model(dora)
    params = trained(cfg)
    assert_equal(jax.jit(lambda params: merge(cfg, params).params)(params), merge(cfg, params).params, atol=1e-5)


@KINDS
def test_adapters_load_into_another_base(dora):
    cfg = model(dora)
    params = trained(cfg)
    shipped = adapters(params)
    names = {"a", "b"} | ({"magnitude"} if dora else set())
    assert {path.rpartition(".")[2] for path in by_path(shipped)} == names
    assert set(by_path(shipped)) == {path for path in by_path(params) if ".adapter." in path}

    fresh = trained(cfg, seed=3)
    there = load(fresh, shipped)
    assert jax.tree.structure(there) == jax.tree.structure(params)
    for path, leaf in by_path(there).items():
        assert leaf is by_path(shipped if ".adapter." in path else fresh)[path]

    base = without_adapters(fresh)
    assert jax.tree.structure(base) == jax.tree.structure(abstract(tiny_model())[1])
    assert_equal(load(base, shipped), there, rtol=0)
    assert adapters(base) == {}
    assert set(by_path(adapters(abstract(cfg)[1]))) == set(by_path(shipped))  # also accepts shapes


def test_kept_adapters_can_be_loaded():
    cfg = model(True)
    params = trained(cfg)
    merged = merge(cfg, params)
    assert_equal(load(params, merged.kept), params, rtol=0)


def test_merge_removes_the_rates_that_freeze_set():
    from axcore.train import Learner, Trainer
    from axcore.train.data import TextFiles, TextInput

    source = TextInput.Config(source=TextFiles.Config(folder="texts"), seq_len=8, batch_size=2)
    base = Trainer.Config(
        model=tiny_model(), input=source, learner=Learner.Config(rates={"embedding.**": 0.0}), steps=1
    )
    cfg = model(False, base=base)
    params = trained(cfg.model)
    merged = merge(cfg, params)
    assert merged.cfg == base
    assert jax.tree.structure(merged.params) == jax.tree.structure(base.build().program().state.params)
    assert_equal(unmerge(cfg, merged.params, merged.kept), params, rtol=1e-5, atol=1e-5)


def test_mismatched_parameters_are_rejected_by_path():
    cfg = model(True, where="**.query")
    params = trained(cfg)
    merged = merge(cfg, params)
    where = r"decoder\.layers\.attention\.query"
    with pytest.raises(ax.ConfigError, match="has no LoRA or DoRA adapter"):
        merge(merged.cfg, merged.params)
    with pytest.raises(ax.AxcoreError, match=rf"{where}\.adapter has the arrays none, .*expects a \[2, 16, 2\]"):
        merge(cfg, merged.params)
    with pytest.raises(ax.AxcoreError, match=rf"{where}\.adapter has the arrays a \[2, 16, 2\].* a \[2, 16, 4\]"):
        merge(ax.use("lora", rank=4, where="**.query", dora=True)(tiny_model()), params)
    with pytest.raises(ax.AxcoreError, match=rf"have no {where}\.weight"):
        merge(cfg, {"decoder": {}})
    with pytest.raises(ax.AxcoreError, match=rf"{where}\.adapter: .* not merged"):
        unmerge(cfg, params, merged.kept)
    with pytest.raises(ax.AxcoreError, match=rf"{where}\.adapter has the arrays none"):
        unmerge(cfg, merged.params, {})
    with pytest.raises(ax.AxcoreError, match=rf"{where}\.adapter lacks 'magnitude_scale'"):
        unmerge(cfg, merged.params, adapters(params))


def test_mismatched_adapters_are_rejected_by_path():
    params = trained(model(False, where="**.query"))
    other = trained(model(False, where="**.query", base=tiny_model().set(dim=8)))
    where = r"decoder\.layers\.attention\.query\.adapter"
    with pytest.raises(ax.AxcoreError, match=rf"{where} has the arrays a \[2, 8, 2\].*expects a \[2, 16, 2\]"):
        load(params, adapters(other))
    deeper = trained(ax.use("lora", rank=4, where="**.query")(tiny_model()))
    with pytest.raises(ax.AxcoreError, match=rf"{where} has the arrays a \[2, 16, 4\].*expects a \[2, 16, 2\]"):
        load(params, adapters(deeper))
    with pytest.raises(ax.AxcoreError, match=r"below encoder, which the model lacks"):
        load(params, {"encoder": adapters(params)})
    norm = {"norm": {"adapter": adapters(params)["decoder"]["layers"]["attention"]["query"]["adapter"]}}
    with pytest.raises(ax.AxcoreError, match=r"norm\.adapter is an adapter of a weight that the model lacks"):
        load(params, norm)
