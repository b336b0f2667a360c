"""Remat policies: what they keep, offload and recompute, by tag and by kind of layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import axcore as ax
from axcore.config import ConfigError
from axcore.module import abstract
from axcore.nn import Attention, CausalLM, FeedForward, PostNormLayer, Repeat, Sequence, TransformerLayer
from axcore.parallel import ByKind, ByTag, Mesh, Remat, SaveMatmuls
from axcore.parallel.remat import check_kinds, checked_tags
from axcore.train import Learner
from axcore.train.step.program import program

X, W = jnp.ones((2, 3)), jnp.full((3, 3), 0.5)


def block(x, w):
    return jnp.sin(checkpoint_name(jnp.sin(x) @ w, "kept"))


def gradient(remat):
    wrapped = block if remat is None else jax.checkpoint(block, policy=remat.policy())
    return jax.grad(lambda x, w: wrapped(x, w).sum())


def num_products(remat):
    """How often the product is computed: once, or again in the backward pass."""
    jaxpr = str(jax.make_jaxpr(gradient(remat))(X, W))
    return jaxpr.count("dot_general[") - 1  # one product belongs to the gradient of x


@pytest.mark.parametrize(
    ("remat", "computed"),
    [
        (None, 1),
        (Remat(), 2),
        (SaveMatmuls(), 1),
        (ByTag(save=("kept",)), 1),
        (ByTag(save=("k?p*",)), 1),
        (ByTag(save=("other",)), 2),
        (ByTag(save=("*",), recompute=("kept",)), 2),
        (ByTag(offload=("kept",)), 1),
        (ByTag(save=("*",), offload=("*",), recompute=("*",)), 2),
    ],
    ids=repr,
)
def test_a_policy_determines_how_often_a_product_is_computed(remat, computed):
    assert num_products(remat) == computed
    np.testing.assert_allclose(jax.jit(gradient(remat))(X, W), gradient(None)(X, W), rtol=1e-6)


def test_offloaded_values_are_in_the_memory_of_the_host():
    def text(remat):
        return str(jax.make_jaxpr(gradient(remat))(X, W))

    assert "<host>" in text(ByTag(save=("*",), offload=("kept",)))
    assert "<host>" not in text(ByTag(save=("*",)))


def test_a_glob_that_matches_no_tag_raises_with_the_tags():
    def trace(remat):
        with checked_tags():
            jax.make_jaxpr(gradient(remat))(X, W)

    trace(ByTag(save=("kept", "query", "k*"), recompute=("lse",)))  # tags of the core need not occur
    with pytest.raises(ConfigError, match=r"'keept'\. Did you mean 'kept'\? Tags of the layers: kept\. .*query"):
        trace(ByTag(save=("keept",)))
    for name in ("offload", "recompute"):
        with pytest.raises(ConfigError, match="no value is tagged 'quarry'"):
            trace(ByTag(**{name: ("quarry",)}))


PRE = TransformerLayer.Config(attention=Attention.Config(num_heads=2), ffn=FeedForward.Config(hidden_dim=8))
POST = PostNormLayer.Config(attention=PRE.attention, ffn=PRE.ffn)
BATCH = {
    "inputs": jax.ShapeDtypeStruct((1, 4), jnp.int32),
    "targets": jax.ShapeDtypeStruct((1, 4), jnp.int32),
    "weights": jax.ShapeDtypeStruct((1, 4), jnp.float32),
}


def lowered(remat):
    """The step of a stack of two kinds of layers."""
    model = CausalLM.Config(vocab_size=8, dim=4, decoder=Sequence.Config(layers=(PRE, POST), remat=remat))
    return program(model, Learner.Config(), Mesh().make(jax.devices()[:1])).lower_train(BATCH)


@pytest.mark.long
def test_the_step_checks_tags_and_kinds():
    message = r"'ups'\. Did you mean 'up'\? Tags of the layers: gate, heads, key, projection, query, up, value\."
    with pytest.raises(ConfigError, match=message):
        lowered(ByKind(kinds={"PostNormLayer": ByTag(save=("ups",))}))
    message = r"model\.decoder\.remat\.kinds: the stack contains no 'PostNormLair'\. Did you mean 'PostNormLayer'\?"
    with pytest.raises(ConfigError, match=message):
        lowered(ByKind(kinds={"PostNormLair": Remat()}))


def test_each_class_of_layer_has_its_policy():
    tagged, everything = ByTag(save=("heads",)), Remat()
    remat = ByKind(kinds={"PostNormLayer": tagged, "FeedForward": everything})
    assert remat.for_layer(POST) == tagged
    assert remat.for_layer(PRE) == everything
    assert ByKind(kinds={"FeedForward": None}, others=tagged).for_layer(PRE) is None
    assert ByKind(kinds={"MoE": everything}, others=tagged).for_layer(PRE) == tagged
    assert ByKind(kinds={"MoE": tagged}).for_layer(PRE) is None
    with pytest.raises(ConfigError, match="for_layer"):
        remat.policy()


@pytest.mark.long
@pytest.mark.parametrize("stack", [Repeat.Config(num_layers=2), Sequence.Config(layers=())], ids=["scan", "sequence"])
def test_stacks_recompute_by_class_of_layer(stack):
    layer = FeedForward.Config(hidden_dim=8)
    stack = stack.set(input_dim=4, layers=layer if isinstance(stack, Repeat.Config) else (layer,))

    def num_products(remat):
        fn, params, state = abstract(stack.set(remat=remat), "stack")
        gradient_of = jax.grad(lambda params: fn(params, state, jnp.ones((4, 4)))[0][0].sum())
        return str(jax.make_jaxpr(gradient_of)(params)).count("dot_general[")

    assert num_products(ByKind(kinds={"FeedForward": Remat()})) == num_products(Remat()) > num_products(None)
    assert num_products(ByKind(kinds={"FeedForward": None}, others=Remat())) == num_products(None)


def test_the_feature_sets_the_policy_of_every_stack():
    model = CausalLM.Config(vocab_size=8, dim=4, decoder=Repeat.Config(num_layers=2, layers=PRE))
    cfg = ax.pipe(model, ax.use("remat", save=("heads", "lse"), offload=("gate", "up")))
    assert cfg.decoder.remat == ByTag(save=("heads", "lse"), offload=("gate", "up"))
    check_kinds(cfg, "model")
