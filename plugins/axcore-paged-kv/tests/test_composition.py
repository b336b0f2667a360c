"""Pages with latent attention, shared keys, differential attention, Mamba-2 and a ring cache, as unstacked and scanned
layers: decoding from pages in random order equals full recomputation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.module import functional
from axcore.nn import Attention, LatentAttention, Normal
from axcore.testing import tiny_model
from axcore.testing.models import by_path
from axcore_paged_kv.cache import PagedCache

MAX_LEN, LENGTH = 12, 9
IDS = jax.random.randint(jax.random.key(4), (2, LENGTH), 0, 32)
TABLES = jnp.asarray([[6, 1, 4, 8], [0, 7, 3, 8]])
CACHE = PagedCache.Config(page_size=4, num_pages=8)


def model(*features, num_layers=2):
    cfg = ax.select(tiny_model(), "embedding").set(init=Normal(stddev=1.0))
    return ax.pipe(ax.select(cfg, "decoder").set(num_layers=num_layers), *features)


def latent(cfg):
    attention = LatentAttention.Config(
        num_heads=4, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, value_dim=3, absorb_up_to=2
    )
    return ax.select(cfg, Attention).map(lambda _, __: attention)


MODELS = {
    "latent": lambda: model(latent),
    "cross-layer KV": lambda: model(ax.use("cross-layer-kv", every=2), num_layers=4),
    "differential": lambda: model(ax.use("diff-attention")),
    "Mamba-2": lambda: model(
        ax.use("mamba2", attention_every=2, head_dim=8, state_dim=8, chunk=4, conv_width=3), num_layers=4
    ),
    "ring": lambda: model(ax.use("sliding-window", size=3, global_every=2), ax.use("ring-kv", spare=2), num_layers=4),
}
ALL_PAGED = ("latent", "cross-layer KV", "differential")


IN_CI = (("latent", "unstacked"), ("cross-layer KV", "scanned"), ("ring", "scanned"))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        pytest.param(name, layers, marks=pytest.mark.long if (name, layers) in IN_CI else pytest.mark.slow)
        for name in MODELS
        for layers in ("unstacked", "scanned")
    ],
)
def test_decoding_from_pages_equals_recomputation(name, layers):
    built = MODELS[name]().build(rngs=ax.Rngs(0))
    fn, params, state = functional(built)
    expected = np.asarray(jax.jit(lambda ids: fn(params, state, ids)[0][0])(IDS))
    decoder, params, state = Decoder.of(
        built, cache=CACHE, batch_size=2, max_len=MAX_LEN, unstack=layers == "unstacked"
    )
    assert decoder.shares_prefixes == (name in ALL_PAGED)
    axes = jax.tree.leaves(decoder.state_axes, is_leaf=lambda node: isinstance(node, tuple))
    state = jax.tree.map(lambda x, a: jnp.full_like(x, jnp.nan) if "page" in a else x, state,
                         jax.tree.unflatten(jax.tree.structure(state), axes))  # fmt: skip
    step, lengths = jax.jit(decoder.__call__, donate_argnums=1), np.asarray([5, 4])
    padded = Step(IDS[:, :5], jnp.zeros(2, jnp.int32), lengths=jnp.asarray(lengths), pages=TABLES)
    logits, state = step(params, state, padded)
    for row, count in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :count], expected[row, :count], rtol=0, atol=2e-5)
    for _ in range(3):
        token = jnp.stack([IDS[row, at : at + 1] for row, at in enumerate(lengths)])
        logits, state = step(params, state, Step(token, jnp.asarray(lengths), pages=TABLES))
        wanted = np.stack([expected[row, at : at + 1] for row, at in enumerate(lengths)])
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-5)
        lengths = lengths + 1


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("latent", 2 * (6 + 2) * 4),  # layers, rank and rotary features, float32
        ("cross-layer KV", 2 * 2 * 2 * 4 * 4),  # groups, k and v, kv heads, head_dim, float32
        ("Mamba-2", 2 * 2 * 2 * 4 * 4),  # two of four layers
    ],
)
def test_bytes_per_token(name, per_token):
    decoder, _, _ = Decoder.abstract(MODELS[name](), cache=CACHE, batch_size=2, max_len=MAX_LEN)
    assert decoder.bytes_per_token == per_token


def test_latents_have_no_scales_of_values():
    cache = CACHE.set(dtype="int8")
    decoder, _, state = Decoder.abstract(MODELS["latent"](), cache=cache, batch_size=2, max_len=MAX_LEN)
    names = {path.rpartition(".")[2] for path in by_path(state["model"])}
    assert names == {"keys", "keys_scale", "values"}
    assert decoder.bytes_per_token == 2 * (8 + 4)
