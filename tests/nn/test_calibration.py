"""`calibrated` measures the inputs of each layer in a float model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axcore as ax
from axcore import nn
from axcore.infer import Decoder, Generator
from axcore.module import functional, invoke
from axcore.nn import Linear, Repeat, Weighted
from axcore.numerics import CalibrationState, Numerics, calibrated, require_calibrated, stored
from axcore.parallel import Remat
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.models import by_path

LAYERS = 2


class Static(Numerics):
    """Codes of the weight, and inputs on a grid whose largest value is measured."""

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.amax = CalibrationState(jnp.full((), jnp.nan), axes=())

    def encode(self, weight):
        return {"codes": jnp.round(weight * 64).astype(jnp.int8)}

    def decode(self, stored):
        return stored["codes"] / 64

    def observe(self, x):
        self.amax[...] = jnp.maximum(self.amax[...], jnp.abs(x).max())

    def __call__(self, x, weight, product):
        scale = self.amax[...] / 127
        return product(jnp.clip(jnp.round(x / scale), -127, 127) * scale, self.matrix(weight))


class Sees(Numerics):
    """Reports the largest input, which `calibrated` is to find."""

    def __call__(self, x, weight, product):
        self.add_output("seen", jnp.abs(x).max())
        return super().__call__(x, weight, product)


def batches(count=3):
    return [jax.random.randint(jax.random.key(i), (2, 8), 0, 32) for i in range(count)]


def largest_inputs(model, params, state, ids):
    """{path of a layer: its largest input}, per layer of a stack."""
    fn = functional(model.build(rngs=ax.Rngs(0)))[0]
    found = invoke(fn.bind(params, state), ids, capture=["**.seen"])[1].outputs
    return {path.replace(".*", "").replace("seen", "amax"): np.asarray(value) for path, value in found.items()}


def numerics(model, made, where=Weighted):
    return ax.select(model, where).set(numerics=made)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"remat": Remat()}, {"unroll": LAYERS}], ids=["scan", "remat", "unrolled"])
@pytest.mark.parametrize("experts", [False, True])
def test_the_maximum_over_all_batches_is_found_for_each_layer(options, experts):
    model = ax.select(tiny_model(), Repeat).set(**options)
    if experts:
        model = ax.use("moe", num_experts=4)(model)
    model = model.set(head=None)
    _, params, state = functional(model.build(rngs=ax.Rngs(0)))
    found = by_path(calibrated(numerics(model, Static.Config()), params, state, batches()))
    each = [largest_inputs(numerics(model, Sees.Config()), params, state, ids) for ids in batches()]
    expected = {path: np.max([values[path] for values in each], axis=0) for path in each[0]}
    amax = {path: value for path, value in found.items() if path.endswith("amax")}
    assert amax.keys() == expected.keys() and len(amax) >= 8
    for path, value in amax.items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-5, err_msg=path)
    assert amax["decoder.layers.attention.query.numerics.amax"].shape == (LAYERS,)


@pytest.mark.long
def test_static_scales_serve_the_stored_model():
    cfg = numerics(tiny_model(), Static.Config(), Linear)
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    ids = tiny_batch()["inputs"]
    assert np.isnan(fn(params, state, ids)[0][0]).all(), "a model that is not calibrated must not look as if it worked"
    exact = functional(tiny_model().build(rngs=ax.Rngs(0)))[0](params, {}, ids)[0][0]
    state = calibrated(cfg, params, {}, [ids])
    model, codes = stored(cfg, params)
    found = functional(model.build(rngs=ax.Rngs(0)))[0](codes, state, ids)[0][0]
    assert 0 < np.linalg.norm(found - exact) < 0.15 * np.linalg.norm(exact)
    again = calibrated(model, codes, state, [ids])  # stored weights, and another calibration
    for path, value in by_path(again).items():
        np.testing.assert_allclose(value, by_path(state)[path], rtol=0.2, err_msg=path)


def test_layers_without_products_and_other_state_keep_their_state():
    class Counts(Sees):
        def __init__(self, cfg, *, rngs):
            super().__init__(cfg, rngs=rngs)
            self.count = nnx.Variable(jnp.zeros(()), axes=())

    cfg = ax.select(numerics(tiny_model(), Static.Config()), "head").set(numerics=Counts.Config())
    _, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    state["head"]["numerics"]["count"] = jnp.asarray(3.0)
    found = calibrated(cfg, params, state, batches(1))
    assert found["head"]["numerics"]["count"] == 3
    assert found["embedding"]["numerics"]["amax"] == 0  # only looks up rows
    del state["head"]
    with pytest.raises(ax.AxcoreError, match=r"the state has no entry at head\.numerics\.count"):
        calibrated(cfg, params, state, batches(1))


def test_numerics_without_statistics_are_refused():
    _, params, state = functional(tiny_model().build(rngs=ax.Rngs(0)))
    for cfg in (tiny_model(), numerics(tiny_model(), Sees.Config())):
        with pytest.raises(ax.ConfigError, match="no numerics in the config are calibrated; add numerics with static"):
            calibrated(cfg, params, state, batches())
    with pytest.raises(ax.ConfigError, match="batches is empty"):
        calibrated(numerics(tiny_model(), Static.Config()), params, state, [])


def test_a_model_that_is_not_calibrated_raises():
    cfg = numerics(tiny_model(), Static.Config(), Linear)
    model = cfg.build(rngs=ax.Rngs(0))
    with pytest.raises(
        ax.ConfigError, match=r"^decoder\.layers\.[a-z._]+\.numerics: amax is not measured \(nor that of 7 "
    ):
        require_calibrated(model)
    with pytest.raises(ax.ConfigError, match="amax is not measured"):
        Generator(model, context=8)
    with pytest.raises(ax.ConfigError, match="amax is not measured"):
        Decoder.of(model, cache=nn.ContiguousCache.Config(), batch_size=1, max_len=8)
    fn, params, state = functional(model)
    require_calibrated(fn.bind(params, calibrated(cfg, params, state, batches(1))))


@pytest.mark.long
def test_training_that_is_not_calibrated_raises_before_the_folder_is_created(tmp_path):
    recipe = ax.recipe("quickstart")
    cfg = recipe.set(
        model=numerics(tiny_model().set(vocab_size=300), Static.Config(), Linear),
        input=recipe.input.set(batch_size=8, seq_len=8),
        steps=1,
        minutes=None,
    )
    with pytest.raises(ax.ConfigError, match=r"^model\.decoder\.layers\.[a-z._]+\.numerics: amax is not"):
        ax.fit(cfg, tmp_path / "run")
    assert not (tmp_path / "run").exists()
