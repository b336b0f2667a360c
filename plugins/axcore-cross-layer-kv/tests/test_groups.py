"""Config edits: which layers share keys and values, and which configs are rejected."""

import jax
import pytest

import axcore as ax
from axcore.module import ContextError, abstract
from axcore.nn import Attention, FeedForward, Linear, Repeat, Sequence, TransformerLayer
from axcore.parallel import Remat
from axcore_cross_layer_kv.caches import BorrowKV, ShareKV
from axcore_cross_layer_kv.groups import use_cross_layer_kv

from .reference import LAYER, batch, listed, model, repeated

OTHER = FeedForward.Config(hidden_dim=4)


def roles(cfg):
    """Path of each attention -> (role, name that it shares or takes keys and values under)."""
    kinds = {ShareKV.Config: "shares", BorrowKV.Config: "borrows", type(None): "alone"}
    return {
        path: (kinds[type(node.cache)], getattr(node.cache, "name", None))
        for path, node in ax.select(cfg, Attention)
        if (node.key is None) == (node.value is None) == isinstance(node.cache, BorrowKV.Config)
    }


def test_a_repeat_repeats_groups():
    cfg = ax.use("cross-layer-kv", every=3)(repeated(6, unroll=4, remat=Remat()))
    decoder = cfg.decoder
    assert (decoder.num_layers, decoder.unroll, decoder.remat, decoder.layers.remat) == (2, 2, None, Remat())
    assert roles(decoder) == {
        "layers.layers.0.attention": ("shares", "0.attention"),
        "layers.layers.1.attention": ("borrows", "0.attention"),
        "layers.layers.2.attention": ("borrows", "0.attention"),
    }
    assert all(layer.ffn == LAYER.ffn for layer in decoder.layers.layers)


@pytest.mark.parametrize(("unroll", "expected"), [(1, 1), (2, 1), (3, 2), (4, 2), (9, 2)])
def test_unroll_is_divided_by_the_group_size(unroll, expected):
    assert repeated(4, 2, unroll=unroll).decoder.unroll == expected


def test_sequence_is_grouped_by_index():
    assert roles(listed(4, 2).decoder) == {
        "layers.0.attention": ("shares", "0.attention"),
        "layers.1.attention": ("borrows", "0.attention"),
        "layers.2.attention": ("shares", "0.attention"),
        "layers.3.attention": ("borrows", "0.attention"),
    }


def test_layers_without_attention_are_skipped():
    cfg = use_cross_layer_kv(Sequence.Config(layers=(OTHER, LAYER, OTHER, LAYER)))
    assert roles(cfg) == {
        "layers.1.attention": ("shares", "1.attention"),
        "layers.3.attention": ("borrows", "1.attention"),
    }


def test_where_selects_the_layers():
    cfg = use_cross_layer_kv(listed(3), where=lambda path, _: path.endswith(("0.attention", "2.attention")))
    assert [role for role, _ in roles(cfg.decoder).values()] == ["shares", "alone", "borrows"]


def test_sequence_with_one_attention_counts_as_one_layer():
    hybrid = Repeat.Config(num_layers=4, layers=Sequence.Config(layers=(OTHER, LAYER)))
    cfg = use_cross_layer_kv(hybrid)
    assert cfg.num_layers == 2
    assert roles(cfg) == {
        "layers.layers.0.layers.1.attention": ("shares", "0.layers.1.attention"),
        "layers.layers.1.layers.1.attention": ("borrows", "0.layers.1.attention"),
    }


def test_repeated_sequence_with_two_attentions_is_grouped_inside():
    alternating = Repeat.Config(num_layers=3, layers=Sequence.Config(layers=(LAYER, OTHER, LAYER)))
    cfg = use_cross_layer_kv(alternating)
    assert cfg.num_layers == 3
    assert roles(cfg) == {
        "layers.layers.0.attention": ("shares", "0.attention"),
        "layers.layers.2.attention": ("borrows", "0.attention"),
    }


def test_stacks_are_grouped_separately():
    two = Sequence.Config(layers=(Repeat.Config(num_layers=2, layers=LAYER), Repeat.Config(num_layers=4, layers=LAYER)))
    cfg = use_cross_layer_kv(two)
    assert isinstance(cfg.layers[0], Sequence.Config) and cfg.layers[1].num_layers == 2
    assert [role for role, _ in roles(cfg).values()] == ["shares", "borrows"] * 2


def test_the_last_group_may_be_shorter():
    stack = Repeat.Config(num_layers=5, layers=LAYER, unroll=5, remat=Remat())
    cfg = use_cross_layer_kv(stack, allow_shorter=True)
    assert (cfg.remat, cfg.layers[0].num_layers, cfg.layers[0].unroll) == (Remat(), 2, 2)
    assert roles(cfg) == {
        "layers.0.layers.layers.0.attention": ("shares", "0.attention"),
        "layers.0.layers.layers.1.attention": ("borrows", "0.attention"),
        "layers.1.attention": ("shares", "0.attention"),
    }
    assert len(use_cross_layer_kv(stack.set(num_layers=2), every=3, allow_shorter=True).layers) == 2
    listed_roles = roles(use_cross_layer_kv(listed(5), every=3, allow_shorter=True)).values()
    assert [role for role, _ in listed_roles] == ["shares", "borrows", "borrows", "shares", "borrows"]


class TwoAttentions(TransformerLayer):
    class Config(TransformerLayer.Config):
        second: Attention.Config = LAYER.attention

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.second = self.child("second", cfg.second, rngs, input_dim=cfg.input_dim)

    def __call__(self, x, tokens):
        return super().__call__(x, tokens) + self.second(x, tokens)


def test_attentions_are_paired_by_their_path_in_the_layer():
    layer = TwoAttentions.Config(attention=LAYER.attention, second=LAYER.attention.set(num_kv_heads=4), ffn=LAYER.ffn)
    cfg = use_cross_layer_kv(model(Repeat.Config(num_layers=2, layers=layer)))
    assert list(roles(cfg.decoder.layers).values()) == [
        ("shares", "0.attention"),
        ("shares", "0.second"),
        ("borrows", "0.attention"),
        ("borrows", "0.second"),
    ]
    run(cfg)  # pairing different attentions would raise, since their numbers of heads differ


def run(cfg):
    """Traces a call."""
    fn, params, state = abstract(cfg)
    jax.eval_shape(lambda params: fn(params, state, batch()["inputs"]), params)


@pytest.mark.parametrize(
    ("cfg", "options", "message"),
    [
        (
            repeated(3),
            {},
            r"at decoder: 3 layers .* every=2\. Use 2 or 4 layers, every=3, or allow_shorter",
        ),
        (repeated(2), {"every": 5}, r"at decoder: 2 layers .* every=5\. Use 5 layers, every=2, or allow_shorter"),
        (repeated(1), {}, r"^decoder\.layers\.attention: not in a stack with another layer"),
        (
            listed(5),
            {"every": 3},
            r"at decoder: 5 layers with attention .*\. Use 3 or 6 layers, every=5, or allow_shorter",
        ),
        (listed(1), {}, r"^decoder\.layers\.0\.attention: not in a stack with another layer"),
        (LAYER.attention, {}, "^the root: not in a stack"),
        (LAYER.ffn, {"where": FeedForward}, "^at the root: only attentions can share"),
        (repeated(2), {"every": 1}, "every must be at least 2, not 1"),
        (repeated(2), {"where": "decoder.layers"}, r"at decoder\.layers: only attentions can share"),
        (repeated(2), {"where": "no.such"}, "nothing in the config matches"),
        (repeated(4, 2), {}, r"at decoder\.layers\.layers\.0\.attention: already shares keys and values"),
        (model(Repeat.Config(layers=LAYER)), {}, "at decoder: num_layers of a Repeat is REQUIRED"),
        (
            Sequence.Config(layers=(LAYER, Sequence.Config(layers=(OTHER, LAYER)))),
            {},
            r"layers 0 and 1 cannot share keys, .* different paths: attention and layers\.1\.attention",
        ),
        (
            Sequence.Config(layers=(LAYER, Repeat.Config(num_layers=2, layers=LAYER))),
            {},
            r"^layers\.0\.attention: not in a stack",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_invalid_groups_are_rejected_by_path(cfg, options, message):
    with pytest.raises(ax.ConfigError, match=message):
        use_cross_layer_kv(cfg, **options)


SHARES, BORROWS = "decoder.layers.layers.0.attention", "decoder.layers.layers.1.attention"


@pytest.mark.parametrize(
    ("path", "change", "error", "message"),
    [
        (
            SHARES,
            {"cache": None},
            ContextError,
            r"^decoder\.layers\.\*\.layers\.1\.attention\.cache .*requires an earlier",
        ),
        (SHARES, {"key": None, "value": None}, ax.ConfigError, r"layers\.0\.attention\.cache: .* no key and value"),
        (SHARES, {"num_kv_heads": 1}, ax.ConfigError, r"layers\.1\.attention\.cache: .*\(1, 2\), .* has \(2, 2\)"),
        (BORROWS, {"key": Linear.Config(), "value": Linear.Config()}, ax.ConfigError, r"layers\.1.*would not be used"),
    ],
)
def test_groups_broken_by_later_edits_are_rejected_by_path(path, change, error, message):
    with pytest.raises(error, match=message):
        run(ax.select(repeated(4, 2), path).set(**change))
