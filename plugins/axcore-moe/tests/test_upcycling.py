"""A mixture initialized from a dense model computes the same function."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import axcore as ax
from axcore.module import abstract, initializer
from axcore.nn import FeedForward, Linear
from axcore.testing import tiny_batch, tiny_model
from axcore.train import FromRun, save_model
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat, like
from axcore_moe.upcycling import Upcycled, upcycled


def base():
    cfg = ax.select(tiny_model(), "decoder").set(num_layers=4)
    return ax.select(cfg, FeedForward).set(up=Linear.Config(use_bias=True))


def computed(cfg, params, state):
    fn = abstract(cfg)[0]
    return jax.jit(lambda params, state, ids: fn(params, state, ids)[0][0])(params, state, tiny_batch()["inputs"])


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """(folder, output of the dense model)."""
    cfg = base()
    params, state = jax.jit(initializer(cfg))(jax.random.key(3))
    bias = params["decoder"]["layers"]["ffn"]["up"]["bias"]
    params["decoder"]["layers"]["ffn"]["up"]["bias"] = (
        np.random.default_rng(0).normal(size=bias.shape).astype("float32")
    )
    folder = save_model(tmp_path_factory.mktemp("dense") / "model", cfg, params, state)
    return folder, computed(cfg, params, state)


def started(folder, cfg, **fields):
    """(parameters, state) of a run that starts from the dense model."""
    _, params, state = abstract(cfg)
    initial = Upcycled.Config(source=FromRun.Config(folder=str(folder)), **fields)
    arrays = initial_arrays(initial, cfg, flat(params), flat(state), 0)
    return like(params, arrays), like(state, arrays)


@pytest.mark.long
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_upcycled_model_matches_the_dense_model(dense, every):
    cfg = ax.pipe(base(), ax.use("moe", num_experts=3, every=every))
    np.testing.assert_allclose(computed(cfg, *started(dense[0], cfg)), dense[1], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_noise_makes_the_experts_differ(dense):
    cfg = ax.pipe(base(), ax.use("moe", num_experts=3))
    plain, noisy = (started(dense[0], cfg, noise=noise)[0]["decoder"]["layers"]["ffn"]["experts"] for noise in (0, 0.1))
    for name, leaf in plain.items():
        added = np.asarray(noisy[name]["weight"] - leaf["weight"])
        assert not np.allclose(added[:, 0], added[:, 1])
        np.testing.assert_allclose(added.std() / np.std(leaf["weight"][:, 0]), 0.1, rtol=0.25)


def test_copies_are_sharded_like_the_experts():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    experts = jax.ShapeDtypeStruct((2, 3, 4, 5), np.float32, sharding=sharding)
    block = np.random.default_rng(0).normal(size=(2, 4, 5)).astype(np.float32)
    made = upcycled({"ffn.up.weight": block, "norm.scale": block}, {"ffn.experts.up.weight": experts})
    assert list(made) == ["ffn.experts.up.weight"] and made["ffn.experts.up.weight"].sharding == sharding
    np.testing.assert_array_equal(made["ffn.experts.up.weight"], np.repeat(block[:, None], 3, axis=1))


def test_source_loads_with_the_sharding_of_the_experts():
    asked = {}

    class Asked(FromRun):
        class Config(FromRun.Config):
            folder: str = ""

        def load(self, model, params, state):
            asked.update(params)
            return {}

    cfg = ax.pipe(tiny_model(), ax.use("moe", num_experts=4))
    layout = dataclasses.replace(ax.parallel.Mesh().make(jax.devices()[:1]), rules={"expert": "data", "embed": "fsdp"})
    fn, params, state = abstract(cfg)
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        params,
        layout.shardings(params, fn.axes),
    )
    Upcycled.Config(source=Asked.Config()).build().load(cfg, flat(placed), flat(state))
    assert asked["decoder.layers.ffn.up.weight"].sharding.spec == PartitionSpec(None, "fsdp", None)
    assert asked["decoder.layers.ffn.down.weight"].sharding.spec == PartitionSpec(None, "fsdp", None)
    assert set(asked) == set(flat(abstract(tiny_model())[1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_experts": 1}, "at decoder.layers.ffn: a dense model has no weights for a shared block"),
        ({"scale": 2.0}, "must sum to 1, but those of router=.*scale=2.0.* do not"),
        ({"normalize": False}, "must sum to 1"),
        ({"expert_choice": True}, "must sum to 1"),
    ],
)
def test_mixtures_that_differ_from_their_block_are_rejected(options, message, dense):
    with pytest.raises(ax.ConfigError, match=message):
        started(dense[0], ax.pipe(base(), ax.use("moe", num_experts=3, **options)))


def test_models_without_mixtures_and_negative_noise_are_rejected(dense):
    with pytest.raises(ax.ConfigError, match="nothing in the config matches MoE"):
        started(dense[0], base())
    with pytest.raises(ax.ConfigError, match=r"noise must be at least 0, not -1\.0"):
        started(dense[0], ax.pipe(base(), ax.use("moe", num_experts=3)), noise=-1.0)


def test_dense_model_of_another_width_is_rejected(dense):
    with pytest.raises(ax.AxcoreError, match=r"ffn\.up\.weight: the model in model has \(16, 24\), expected \(16, 7\)"):
        started(dense[0], ax.pipe(base(), ax.use("moe", num_experts=3, hidden_dim=7)))
