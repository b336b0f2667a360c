"""`use("lora")` on configs: which layers get adapters, and what is frozen."""

import subprocess
import sys

import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import Attention, Linear
from axcore.testing import tiny_model
from axcore.train import Learner, Trainer
from axcore.train.data import TextFiles, TextInput
from axcore_lora import DoRA, LoRA, adapters, load, merge

FREEZING = {"**": 0.0, "**.adapter.**": 1.0}


def adapted(cfg):
    return {path.removesuffix(".adapter") for path, _ in ax.select(cfg, LoRA)}


def trainer(**rates):
    source = TextInput.Config(source=TextFiles.Config(folder="texts"), seq_len=8, batch_size=2)
    return Trainer.Config(model=tiny_model(), input=source, learner=Learner.Config(rates=rates), steps=1)


def test_every_linear_layer_gets_an_adapter():
    cfg = ax.use("lora", rank=4, alpha=8, dropout=0.1)(tiny_model())
    assert adapted(cfg) == {path for path, _ in ax.select(cfg, Linear)}
    assert {type(node) for _, node in ax.select(cfg, LoRA)} == {LoRA.Config}
    assert cfg.head.adapter == LoRA.Config(rank=4, alpha=8, dropout=0.1)
    assert ax.use("lora", dora=True)(tiny_model()).head.adapter == DoRA.Config(rank=8, alpha=16)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("decoder.layers.attention.query", {"attention.query"}),
        ("**.value", {"attention.value"}),
        ("decoder.layers.attention.**", {f"attention.{x}" for x in ("query", "key", "value", "projection")}),
        (lambda path, node: path.endswith(("up", "ffn_norm")), {"ffn.up"}),
    ],
)
def test_where_selects_only_linear_layers(where, expected):
    cfg = ax.use("lora", rank=2, where=where)(tiny_model())
    assert adapted(cfg) == {f"decoder.layers.{path}" for path in expected}
    paths = {path for path in _paths(abstract(cfg)[1]) if ".adapter." in path}
    assert {path.rpartition(".adapter.")[0] for path in paths} == adapted(cfg)


@pytest.mark.parametrize("where", [Attention, "decoder.layers.attention"])
def test_where_without_a_linear_layer_raises(where):
    with pytest.raises(ax.ConfigError, match=r"no linear layer, only decoder\.layers\.attention\. .* append '\.\*\*'"):
        ax.use("lora", where=where)(tiny_model())


def test_second_use_replaces_the_selected_adapters():
    cfg = ax.pipe(trainer(), ax.use("lora", rank=2), ax.use("lora", rank=4, where="**.query"))
    attention = cfg.model.decoder.layers.attention
    assert (attention.query.adapter.rank, attention.key.adapter.rank) == (4, 2)
    assert cfg.learner.rates == FREEZING


def test_case_weights_narrower_than_the_rank_get_adapters_of_their_width():
    """Such as a router with few experts, or a gate with one feature."""
    params = abstract(ax.use("lora", rank=9)(tiny_model()))[1]["decoder"]["layers"]["attention"]
    assert params["key"]["adapter"]["a"].shape[-1] == params["key"]["weight"].shape[-1] == 8
    assert params["query"]["adapter"]["a"].shape[-1] == 9


class Halved(ax.Layer):
    """An adapter around another: half of its result."""

    class Config(ax.Layer.Config):
        input_dim: int = ax.REQUIRED
        output_dim: int = ax.REQUIRED
        groups: int | None = None
        axes: tuple[str | None, ...] | None = None
        adapter: ax.Layer.Config | None = None

    def __init__(self, cfg, *, rngs):
        widths = {name: getattr(cfg, name) for name in ("input_dim", "output_dim", "groups", "axes")}
        self.adapter = self.child("adapter", cfg.adapter, rngs, **widths)

    def __call__(self, x, y, weight, product):
        return (y if self.adapter is None else self.adapter(x, y, weight, product)) / 2


def use_halved(cfg):
    return ax.select(cfg, "**.value").map(lambda _, node: node.set(adapter=Halved.Config(adapter=node.adapter)))


def test_case_an_adapter_that_wraps_others_composes_in_any_order():
    lora = ax.use("lora", rank=2)
    after, before = ax.pipe(tiny_model(), lora, use_halved), ax.pipe(tiny_model(), use_halved, lora)
    assert after == before
    held = after.decoder.layers.attention.value.adapter
    assert (type(held), held.adapter) == (Halved.Config, LoRA.Config(rank=2))
    everywhere = ax.use("lora", rank=3, where="decoder.layers.attention.**")(after)
    assert everywhere.decoder.layers.attention.value.adapter == Halved.Config(adapter=LoRA.Config(rank=3))

    params = abstract(after)[1]
    shipped = adapters(params)
    assert shipped["decoder"]["layers"]["attention"]["value"]["adapter"]["adapter"].keys() == {"a", "b"}
    assert load(params, shipped) == params
    with pytest.raises(ax.ConfigError, match=r"value\.adapter\.adapter is inside another adapter, .* cannot be merged"):
        merge(after, params)


def test_case_adapters_reach_experts():
    """Whatever was attached first, and also if the rank exceeds the number of experts."""
    lora, moe = ax.use("lora", rank=6), ax.use("moe", num_experts=4)
    shapes = [
        abstract(ax.pipe(tiny_model(), *order))[1]["decoder"]["layers"]["ffn"] for order in ((lora, moe), (moe, lora))
    ]
    for ffn in shapes:
        assert ffn["experts"]["up"]["adapter"]["a"].shape[1:] == (4, 16, 6)
    assert shapes[1]["router"]["linear"]["adapter"]["a"].shape[1:] == (16, 4)


def test_trainer_trains_only_adapters():
    cfg = ax.use("lora", rank=2)(trainer())
    assert cfg.learner.rates == FREEZING
    found = cfg.build().program()
    trained, every = _paths(found.learner.trained(found.state.params)), _paths(found.state.params)
    assert trained == {path for path in every if ".adapter." in path} != set()


def test_nothing_is_frozen_without_freeze_or_a_learner():
    assert ax.use("lora", freeze=False)(trainer()).learner.rates == {}
    assert not any(isinstance(node, Learner.Config) for _, node in ax.select(ax.use("lora")(tiny_model()), Linear))


def test_existing_zero_rates_are_kept():
    before = {"embedding.**": 0.0}
    cfg = ax.use("lora")(trainer(**before))
    assert list(cfg.learner.rates.items()) == [("**", 0.0), ("embedding.**", 0.0), ("**.adapter.**", 1.0)]


def test_existing_adapter_rate_is_kept():
    assert ax.use("lora")(trainer(**{"**.adapter.**": 0.5})).learner.rates == {"**": 0.0, "**.adapter.**": 0.5}


@pytest.mark.parametrize("rates", [{"norm.**": 0.5}, {"**": 0.1}, {"embedding.**": 0.0, "norm.**": 1.0}])
def test_rate_that_freeze_would_override_raises(rates):
    moving = next(pattern for pattern, rate in rates.items() if rate)
    with pytest.raises(ax.ConfigError, match=r"^feature 'lora' .*at learner: rates has .*freeze=False") as error:
        ax.use("lora")(trainer(**rates))
    assert repr(moving) in str(error.value)
    assert ax.use("lora", freeze=False)(trainer(**rates)).learner.rates == rates


def test_text_options_and_json_round_trip():
    from axcore.plugin import use_text

    cfg = ax.pipe(tiny_model(), use_text("lora:rank=2,alpha=4,dora=true,where=**.query"))
    assert cfg.decoder.layers.attention.query.adapter == DoRA.Config(rank=2, alpha=4)
    assert ax.from_json(ax.to_json(cfg)) == cfg


def test_package_imports_neither_jax_nor_flax():
    code = "import axcore_lora, sys; dir(axcore_lora); print({'jax', 'flax'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"


def _paths(tree):
    from axcore.testing.models import by_path

    return set(by_path(tree))
