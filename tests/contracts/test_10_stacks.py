"""Contract 10: third-party stacks support everything that depends on layer numbers: features, weights, decoding."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.config import walk
from axcore.infer import Decoder, Step
from axcore.module import abstract, scan, stack
from axcore.nn import (
    ContiguousCache,
    FeedForward,
    Place,
    Repeat,
    Sequence,
    SlidingWindow,
    Stack,
    TransformerLayer,
    by_layer,
    edit_layers,
    layers_of,
    stacked,
    unstack_arrays,
    unstacked,
)
from axcore.testing import tiny_batch, tiny_model
from axcore.train import FromRun, save_model
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat, like

pytestmark = pytest.mark.long

for plugin in ("axcore_cross_layer_kv", "axcore_hf", "axcore_moe"):
    pytest.importorskip(plugin)

LAYER = tiny_model().decoder.layers
NUM_LAYERS = 4


def repeated_in(layers, parts):
    """(number of groups, config of a group) of layers. The number of groups is a multiple of `parts`."""
    for size in range(1, len(layers) + 1):
        if layers == layers[:size] * (len(layers) // size) and len(layers) // size % parts == 0:
            return len(layers) // size, layers[0] if size == 1 else Sequence.Config(layers=layers[:size])
    raise ax.ConfigError(f"{len(layers)} such layers cannot be divided into {parts} equal parts")


class Halves(Stack):
    """Two scans, each over half of the layers. The arrays are at `lower` and `upper`, and one config is at `block`."""

    class Config(Stack.Config):
        input_dim: int = ax.REQUIRED
        num_layers: int = NUM_LAYERS
        block: ax.Layer.Config = LAYER

        def places(self):
            each = range(self.num_layers // 2)
            return tuple(Place(half, (i,), self.block, node="block") for half in ("lower", "upper") for i in each)

        def restack(self, layers):
            count, block = repeated_in(layers, 2)
            return self.set(num_layers=count, block=block)

    def __init__(self, cfg, *, rngs):
        def build(rngs):
            return self.build_child(cfg.block, rngs, input_dim=cfg.input_dim)

        self.lower = stack(build, rngs.at("lower"), cfg.num_layers // 2)
        self.upper = stack(build, rngs.at("upper"), cfg.num_layers // 2)

    def __call__(self, x, *args):
        for half in (self.lower, self.upper):
            x = scan(half, x, *args, count=self.config.num_layers // 2)
        return x


class Stages(Stack):
    """A pipeline: arrays have the shape [stage, layer in the stage, ...]."""

    class Config(Stack.Config):
        is_sequential: ClassVar[bool] = True
        input_dim: int = ax.REQUIRED
        stages: int = 2
        per_stage: int = NUM_LAYERS // 2
        block: ax.Layer.Config = LAYER

        def places(self):
            numbers = np.ndindex(self.stages, self.per_stage)
            return tuple(Place("stage.layers", tuple(map(int, each)), self.block, node="block") for each in numbers)

        def restack(self, layers):
            count, block = repeated_in(layers, self.stages)
            return self.set(per_stage=count // self.stages, block=block)

    def __init__(self, cfg, *, rngs):
        stage = Repeat.Config(input_dim=cfg.input_dim, num_layers=cfg.per_stage, layers=cfg.block)
        self.stage = stack(lambda rngs: self.build_child(stage, rngs), rngs.at("stage"), cfg.stages)

    def __call__(self, x, *args):
        return scan(self.stage, x, *args, count=self.config.stages)


PROBES = {"halves": Halves.Config(), "stages": Stages.Config()}
MANY = Repeat.Config(num_layers=NUM_LAYERS, layers=LAYER)
EVERY_SECOND = {
    "moe": functools.partial(ax.use, "moe", every=2, num_experts=2, top_k=1),
    "window": functools.partial(ax.use, "sliding-window", size=3, global_every=2),
}


def model(decoder, *features):
    return ax.pipe(tiny_model().set(decoder=decoder), *features)


def arrays(cfg, seed=0):
    """Random parameters and other state with the shapes that `cfg` requires."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (0.3 * random.normal(size=leaf.shape)).astype(leaf.dtype), forms(cfg)[1:])


forms = functools.cache(abstract)
IDS = np.asarray(tiny_batch()["inputs"])


def logits(cfg, params, state):
    fn = forms(cfg)[0]
    return jax.jit(lambda params, state: fn(params, state, IDS)[0][0])(params, state)


def moved(folder, cfg):
    """(parameters, state) that a model loads from a model folder."""
    _, params, state = forms(cfg)
    found = initial_arrays(FromRun.Config(folder=str(folder)), cfg, flat(params), flat(state), 0)
    return like(params, found), like(state, found)


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("feature", EVERY_SECOND)
def test_features_and_weights_address_layers_by_number(name, feature, tmp_path):
    """A feature edits the same layers of a `Repeat` and of the probe. Both compute the same on weights of the other."""
    plain, probe = (model(each, EVERY_SECOND[feature]()) for each in (MANY, PROBES[name]))
    assert type(probe.decoder) is type(PROBES[name])
    places = layers_of(probe.decoder)
    assert [place.config for place in places] == [place.config for place in layers_of(plain.decoder)]
    assert places[0].config == places[2].config != places[1].config == places[3].config
    edited = [any(isinstance(node, SlidingWindow) for _, node in walk(place.config)) for place in places]
    assert edited == ([True, False] * 2 if feature == "window" else [False] * 4)

    params, state = arrays(plain)
    save_model(tmp_path / "plain", plain, params, state)
    to_probe = moved(tmp_path / "plain", probe)
    expected = logits(plain, params, state)
    np.testing.assert_allclose(logits(probe, *to_probe), expected, rtol=1e-5, atol=1e-5)
    save_model(tmp_path / "probe", probe, *to_probe)
    jax.tree.map(np.testing.assert_array_equal, moved(tmp_path / "probe", plain), (params, state))
    assert not np.allclose(logits(plain, *arrays(plain, seed=1)), expected, atol=0.1)


@pytest.mark.parametrize("name", PROBES)
def test_layers_that_a_stack_cannot_run_raise_with_its_path(name):
    def edit(_, node, number):
        return node.set(hidden_dim=8) if number == 1 else node

    with pytest.raises(ax.ConfigError, match=r"^at decoder: 4 such layers cannot be divided into 2 equal parts"):
        edit_layers(model(PROBES[name]), FeedForward, edit)


@pytest.mark.parametrize("name", PROBES)
def test_published_weights_are_read_and_written_by_layer_number(name, tmp_path):
    from axcore_hf import exporting
    from axcore_hf.families import by_type
    from axcore_hf.importing import load
    from axcore_hf.sources import Safetensors

    plain, probe = (model(each, ax.use("rope")) for each in (MANY, PROBES[name]))
    params, state = arrays(plain)
    llama = by_type("llama")
    exporting.write(tmp_path / "plain", llama, plain, flat(params), {})
    source = Safetensors(tmp_path / "plain")
    found = load(llama, plain, source, probe, flat(forms(probe)[1]), {})
    read = like(forms(probe)[1], found)
    np.testing.assert_allclose(logits(probe, read, {}), logits(plain, params, state), rtol=1e-5, atol=1e-5)
    exporting.write(tmp_path / "probe", llama, probe, found, {})
    again = Safetensors(tmp_path / "probe")
    assert again.shapes == source.shapes
    for tensor in source.shapes:
        np.testing.assert_array_equal(again.read(tensor), source.read(tensor))


@pytest.mark.parametrize("name", PROBES)
def test_decoding_with_a_third_party_stack_equals_a_full_call(name):
    cfg = model(PROBES[name], ax.use("rope"), EVERY_SECOND["window"]())
    params, state = arrays(cfg)
    assert_decodes(forms(cfg)[0].bind(params, state), logits(cfg, params, state))


def assert_decodes(module, expected):
    rows, length = IDS.shape
    decoder, params, state = Decoder.of(module, cache=ContiguousCache.Config(), batch_size=rows, max_len=length)
    step = jax.jit(decoder.__call__)
    found = []
    for pieces in (slice(0, 3), *(slice(i, i + 1) for i in range(3, length))):
        out, state = step(params, state, Step(IDS[:, pieces], jnp.full((rows,), pieces.start)))
        found.append(out)
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=1e-4, atol=1e-4)


OTHER = LAYER.set(ffn=FeedForward.Config(hidden_dim=8))
SEQUENTIAL = {
    "repeat": MANY,
    "groups": stacked([LAYER, OTHER] * 3 + [OTHER]),
    "nested": Repeat.Config(
        num_layers=2,
        layers=Sequence.Config(
            dtypes=ax.DTypes(param="bfloat16"),
            layers=(Repeat.Config(num_layers=2, layers=LAYER), OTHER.set(dtypes=ax.DTypes(param="float32"))),
        ),
    ),
    "stages": Stages.Config(block=Sequence.Config(layers=(LAYER, OTHER))),
    "not alone": Sequence.Config(layers=(Halves.Config(), MANY)),
}


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_unstacked_layers_have_separate_arrays(name):
    cfg = model(SEQUENTIAL[name], *([ax.use("moe", bias_rate=0.1, num_experts=2, top_k=1)] if name == "groups" else []))
    flattened = unstacked(cfg)
    assert unstacked(flattened) == flattened
    assert isinstance(flattened.decoder, Sequence.Config)
    assert not [node for _, node in walk(flattened.decoder) if isinstance(node, Repeat.Config | Stages.Config)]
    params, state = arrays(cfg)
    assert bool(state) == (name == "groups")
    new_params, new_state = jax.jit(lambda *trees: [unstack_arrays(cfg, tree) for tree in trees])(params, state)
    for found, wanted in zip((new_params, new_state), forms(flattened)[1:], strict=True):
        assert jax.tree.map(shape, found) == jax.tree.map(shape, wanted)
    places = named(cfg, params)
    for number, (path, index) in named(flattened, new_params).items():
        stacked_path, stacked_index = places.pop(number)
        np.testing.assert_array_equal(flat(new_params)[path][index], flat(params)[stacked_path][stacked_index])
    assert not places
    expected = logits(cfg, params, state)
    np.testing.assert_allclose(logits(flattened, new_params, new_state), expected, rtol=1e-5, atol=1e-5)


def shape(leaf):
    return leaf.shape, leaf.dtype


def named(cfg, params):
    return by_layer(cfg, flat(params))


@pytest.mark.parametrize("stack", [MANY, Stages.Config()], ids=["repeat", "stages"])
def test_unstacking_keeps_values_shared_within_a_group(stack):
    cfg = model(stack, ax.use("cross-layer-kv", every=2))
    assert type(cfg.decoder) is type(stack)
    flattened, (params, state) = unstacked(cfg), arrays(cfg)
    assert [place.path for place in layers_of(flattened.decoder)] == [f"layers.{number}" for number in range(4)]
    arrays_of_each = unstack_arrays(cfg, params)
    expected = logits(cfg, params, state)
    np.testing.assert_allclose(logits(flattened, arrays_of_each, {}), expected, rtol=1e-5, atol=1e-5)
    assert_decodes(forms(flattened)[0].bind(arrays_of_each, {}), expected)


def test_a_stack_inside_a_layer_is_unstacked_too():
    class Wrapped(ax.Layer):
        class Config(ax.Layer.Config):
            input_dim: int = ax.REQUIRED
            inner: ax.Layer.Config = Repeat.Config(num_layers=2, layers=LAYER)

        def __init__(self, cfg, *, rngs):
            self.inner = self.child("inner", cfg.inner, rngs, input_dim=cfg.input_dim)

        def __call__(self, x, tokens):
            return x - self.inner(x, tokens)

    cfg = model(Repeat.Config(num_layers=3, layers=Wrapped.Config()))
    params, state = arrays(cfg)
    flattened = unstacked(cfg)
    assert isinstance(flattened.decoder.layers[2].inner, Sequence.Config)
    np.testing.assert_allclose(
        logits(flattened, unstack_arrays(cfg, params), {}), logits(cfg, params, state), rtol=1e-5, atol=1e-5
    )


class WithNorm(Stages):
    """A stack that has parameters besides its layers, but does not declare them."""

    class Config(Stages.Config):
        pass

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.bias = self.param("bias", (cfg.input_dim,), jax.nn.initializers.ones, rngs, axes=("embed",))


def test_unstacking_raises_if_arrays_would_be_lost():
    cfg = model(WithNorm.Config())
    with pytest.raises(
        ax.ConfigError, match=r"WithNorm has the arrays bias outside its layers.* set is_sequential to False"
    ):
        unstack_arrays(cfg, forms(cfg)[1])
    names = named(cfg, forms(cfg)[1])
    assert names["decoder.bias"] == ("decoder.bias", ())
    assert names["decoder.3.ffn.up.weight"] == ("decoder.stage.layers.ffn.up.weight", (1, 1))


class Shares(TransformerLayer):
    """Shares a part of its result."""

    class Config(TransformerLayer.Config):
        takes: bool = False
        """Whether its input includes what an earlier layer shared."""
        shares: bool = True

    def __call__(self, x, tokens):
        x = super().__call__(x + self.shared("part") if self.config.takes else x, tokens)
        if self.config.shares:
            self.share("part", x / 2)
        return x


KINDS = {
    "N": LAYER,
    "S": Shares.Config(attention=LAYER.attention, ffn=LAYER.ffn),
    "T": Shares.Config(attention=LAYER.attention, ffn=LAYER.ffn, takes=True, shares=False),
    "B": Shares.Config(attention=LAYER.attention, ffn=LAYER.ffn, takes=True),
}


@pytest.mark.parametrize(
    ("layers", "kinds"),
    [
        ("SBBB", ["Shares", "Repeat"]),  # layer 0 alone; each other takes what the one before it shares
        ("NSNST", ["Repeat", "Shares"]),  # what the last layer takes is shared in the scan
    ],
)
def test_case_editing_layers_by_number_does_not_trap_shared_values(layers, kinds):
    """A layer that is edited alone is not in a scan, and scans pass on what their layers share."""
    cfg = edit_layers(
        model(MANY.set(num_layers=len(layers))), TransformerLayer, lambda _, __, number: KINDS[layers[number]]
    )
    assert [type(layer).__qualname__.partition(".")[0] for layer in cfg.decoder.layers] == kinds
    params, state = arrays(cfg)
    found = logits(cfg, params, state)
    np.testing.assert_allclose(found, logits(unstacked(cfg), unstack_arrays(cfg, params), state), atol=1e-5)
