"""Composition with other features: the order does not matter, and they work together."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.nn import ContiguousCache, Repeat
from axcore.parallel import Remat
from axcore.plugin import Feature, registry

from .reference import BATCH, LAYER, SEQ, batch, model, parameters, shapes

CROSS = ax.use("cross-layer-kv")


def feature(name, **options):
    if registry().find(Feature, name) is None:
        pytest.skip(f"no plugin offers {name}")
    return ax.use(name, **options)


FEATURES = {
    "rope": {},
    "diff-attention": {},
    "kernels": {"order": ("reference",)},
    "lora": {"rank": 2},
}


def plain():
    layer = ax.select(LAYER, "attention").set(position=None)
    return model(Repeat.Config(num_layers=4, layers=layer, remat=Remat())).set(head=None)


@pytest.mark.parametrize("name", FEATURES)
def test_the_order_of_two_features_does_not_matter(name):
    other = feature(name, **FEATURES[name])
    assert ax.pipe(plain(), other, CROSS) == ax.pipe(plain(), CROSS, other)


def test_decoding_with_many_features_matches_the_full_pass():
    installed = {name: options for name, options in FEATURES.items() if registry().find(Feature, name) is not None}
    cfg = ax.pipe(plain(), *[ax.use(name, **options) for name, options in installed.items()], CROSS)
    ids = batch()["inputs"]
    fn, _, state = shapes(cfg)
    params = parameters(cfg)
    whole = jax.jit(lambda params: fn(params, state, ids)[0][0])(params)
    decoder, params, state = Decoder.of(
        fn.bind(params, state), cache=ContiguousCache.Config(), batch_size=BATCH, max_len=SEQ
    )
    step, found = jax.jit(decoder.__call__), []
    for start in range(0, SEQ, 3):
        logits, state = step(params, state, Step(ids[:, start : start + 3], np.full((BATCH,), start, np.int32)))
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, rtol=1e-4, atol=1e-4)
