"""The slots of linear maps and attention, and stacks of unequal layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract, functional, invoke
from axcore.nn import Attention, CausalLM, FeedForward, Linear, Normal, Repeat, Sequence, TokenInfo, TransformerLayer
from axcore.numerics import Numerics
from axcore.testing import tiny_batch, tiny_model
from axcore.train import CrossEntropy


class Doubled(Numerics):
    """Numerics that double the product."""

    def __call__(self, x, weight, product):
        assert weight.shape == self.config.shape
        return 2 * product(x, weight)


class Plus(ax.Layer):
    """An adapter with a parameter."""

    class Config(ax.Layer.Config):
        input_dim: int = ax.REQUIRED
        output_dim: int = ax.REQUIRED
        axes: tuple[str | None, ...] | None = None

    def __init__(self, cfg, *, rngs):
        shape = (cfg.input_dim, cfg.output_dim)
        self.extra = self.param("extra", shape, Normal(stddev=1.0), rngs, axes=cfg.axes)

    def __call__(self, x, y, weight, product):
        assert y.shape[-1] == weight.shape[-1]
        return y + product(x, self.extra[...])


def test_the_adapter_acts_after_numerics_and_before_the_bias():
    cfg = Linear.Config(
        input_dim=3,
        output_dim=4,
        use_bias=True,
        axes=("embed", "mlp"),
        numerics=Doubled.Config(),
        adapter=Plus.Config(),
    )
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    assert fn.axes["adapter"]["extra"] == ("embed", "mlp")
    params["bias"] = jnp.arange(4.0)
    x = jax.random.normal(jax.random.key(0), (2, 3))
    wide = {path: np.asarray(value, np.float64) for path, value in params.items() if path != "adapter"}
    expected = x @ (2 * wide["weight"] + np.asarray(params["adapter"]["extra"], np.float64)) + wide["bias"]
    np.testing.assert_allclose(fn(params, state, x)[0][0], expected, rtol=1e-5, atol=1e-5)


def test_filling_slots_does_not_change_parameter_paths():
    plain = Linear.Config(input_dim=3, output_dim=4)
    weights = [functional(cfg.build(rngs=ax.Rngs(0)))[1]["weight"] for cfg in (plain, plain.set(adapter=Plus.Config()))]
    np.testing.assert_array_equal(*weights)


def test_key_and_value_projections_require_each_other():
    for changes in ({"key": None}, {"value": None}, {"key": None, "value": None}):
        with pytest.raises(ax.ConfigError, match="key and value must both be set"):
            Attention.Config(input_dim=8, num_heads=2, **changes).build(rngs=ax.Rngs(0))


def test_sinks_are_a_parameter_for_each_head():
    fn, params, _ = abstract(Attention.Config(input_dim=8, num_heads=4, sinks=Normal()))
    assert params["sinks"].shape == (4,)
    assert fn.axes["sinks"] == ("head",)


def test_scale_softcap_and_sinks_reach_the_kernel():
    x, tokens = jax.random.normal(jax.random.key(0), (2, 5, 8)), TokenInfo.of(jnp.zeros((2, 5), jnp.int32))
    plain = Attention.Config(input_dim=8, num_heads=2)
    found = [
        invoke(plain.set(**changes).build(rngs=ax.Rngs(0)), x, tokens)[0]
        for changes in ({}, {"scale": 2.0}, {"softcap": 0.1}, {"sinks": Normal(stddev=1.0)})
    ]
    for index, one in enumerate(found):
        assert all(np.abs(one - other).max() > 1e-4 for other in found[:index])


def layer(hidden_dim):
    return TransformerLayer.Config(
        attention=Attention.Config(num_heads=2), ffn=FeedForward.Config(hidden_dim=hidden_dim)
    )


def loss_of(decoder, params_of=None):
    cfg = CausalLM.Config(vocab_size=32, dim=8, decoder=decoder)
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    params = params if params_of is None else params_of(params)
    return CrossEntropy.Config().build().value(fn, params, state, tiny_batch()), params


@pytest.mark.slow
def test_a_scanned_sequence_equals_a_sequence_of_all_layers():
    """Layers of different widths, repeated in pairs."""
    scanned, params = loss_of(Repeat.Config(num_layers=2, layers=Sequence.Config(layers=(layer(8), layer(12)))))

    def spread(_):
        pairs = params["decoder"]["layers"]["layers"]
        return params | {
            "decoder": {
                "layers": {index: jax.tree.map(lambda x, i=index: x[i // 2], pairs[index % 2]) for index in range(4)}
            }
        }

    written_out, _ = loss_of(Sequence.Config(layers=(layer(8), layer(12)) * 2), spread)
    np.testing.assert_allclose(scanned, written_out, rtol=1e-6)


def test_a_sequence_may_be_empty_and_numbers_its_layers():
    x = jnp.ones((1, 2, 8))
    assert (invoke(Sequence.Config(input_dim=8, layers=()).build(rngs=ax.Rngs(0)), x)[0] == x).all()
    with pytest.raises(ax.ConfigError, match=r"decoder\.layers\.1\.ffn"):
        abstract(CausalLM.Config(vocab_size=3, dim=8, decoder=Sequence.Config(layers=(layer(8), layer(ax.REQUIRED)))))


def test_rope_supports_queries_without_keys():
    cfg = ax.select(ax.pipe(tiny_model(), ax.use("rope")), "**.position")
    ((_, node),) = cfg
    rotary = node.set(head_dim=4).build(rngs=ax.Rngs(0))
    q = jax.random.normal(jax.random.key(0), (1, 3, 2, 4))
    places = jnp.arange(3)[None]
    alone, nothing = rotary(q, None, places, places)
    assert nothing is None
    np.testing.assert_array_equal(alone, rotary(q, q, places, places)[0])


class Returns(Numerics):
    """Numerics that return something else than the product."""

    class Config(Numerics.Config):
        what: str

    config: Config

    def __call__(self, x, weight, product):
        return {"nothing": None, "x": x, "integers": product(x, weight).astype(jnp.int32)}[self.config.what]


@pytest.mark.parametrize(
    ("what", "found"), [("nothing", "NoneType"), ("x", r"float32\[2, 3\]"), ("integers", r"int32\[2, 5\]")]
)
def test_case_the_product_of_numerics_is_checked(what, found):
    linear = Linear.Config(input_dim=3, output_dim=5, numerics=Returns.Config(what=what))
    fn, params, state = functional(linear.build(rngs=ax.Rngs(0)))
    message = rf"numerics: Returns must return a floating-point array \[2, 5\], not {found}"
    with pytest.raises(ax.ConfigError, match=message):
        fn(params, state, jnp.ones((2, 3)))
