"""Where a feature is and where it should be, on small trees."""

import axcore as ax
from axcore.nn import Attention, CausalLM, FeedForward, Linear, Repeat, TransformerLayer
from axcore_loc.places import places
from axcore_rope.rotary import Rotary


class Special(Attention):
    """A subclass, which covers the same role."""


def model(attention=None):
    layer = TransformerLayer.Config(attention=attention or Attention.Config(num_heads=2), ffn=FeedForward.Config())
    return CausalLM.Config(vocab_size=8, dim=8, decoder=Repeat.Config(num_layers=2, layers=layer))


def rope(cfg):
    return ax.select(cfg, Attention).set(position=Rotary.Config())


def test_added_node_and_its_anchor():
    found = places(model(), rope(model()), "axcore_rope")
    assert found.brought == ("decoder.layers.attention.position",)
    assert [(path, str(role)) for path, role in found.anchors.items()] == [
        ("decoder.layers.attention", "TransformerLayer.attention (Attention)")
    ]


def test_replaced_node_is_its_own_anchor():
    after = ax.select(model(), "decoder.layers.attention").swap(Rotary.Config(), drop=("num_heads",))
    found = places(model(), after, "axcore_rope")
    assert (found.brought, [*found.anchors]) == (("decoder.layers.attention",), ["decoder.layers.attention"])


def test_nodes_with_changed_values_are_anchors():
    found = places(model(), ax.select(model(), FeedForward).set(hidden_dim=3), "axcore_rope")
    assert (found.brought, [*found.anchors]) == ((), ["decoder.layers.ffn"])


def test_same_role_is_expected_in_other_models_and_subclasses():
    roles = places(model(), rope(model()), "axcore_rope").anchors.values()
    special = model(Special.Config(num_heads=2))
    assert places(special, special, "axcore_rope").missing(roles) == ["decoder.layers.attention"]
    assert places(special, rope(special), "axcore_rope").missing(roles) == []


def test_another_slot_of_the_same_class_is_another_role():
    bias = ax.select(model(), "decoder.layers.attention.query").set(use_bias=True)
    roles = places(model(), bias, "axcore_rope").anchors.values()
    assert [str(role) for role in roles] == ["Attention.query (Linear)"]
    assert places(model(), model(), "axcore_rope").missing(roles) == ["decoder.layers.attention.query"]
    assert len(ax.select(model(), Linear)) > 1
