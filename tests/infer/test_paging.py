"""Page tables of a step, the size of the pool, and which decoders share prefixes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.nn import Attention, ContiguousCache, Paging
from axcore.testing import shrunk, tiny_model
from axcore.testing.models import by_path
from axcore_paged_kv.cache import PagedCache
from axcore_rope.rotary import Rotary
from axcore_rope.scaling import LongRoPE

CACHE = PagedCache.Config(page_size=4, num_pages=7)
IDS = jax.random.randint(jax.random.key(1), (2, 6), 0, 32)
START = jnp.zeros(2, jnp.int32)
TABLE = np.asarray([[3, 0, 7], [5, 1, 7]], np.int32)


def abstract(cfg=None, cache=CACHE, **sizes):
    return Decoder.abstract(
        tiny_model() if cfg is None else cfg, cache=cache, **{"batch_size": 2, "max_len": 12} | sizes
    )


@pytest.fixture(scope="module")
def paged():
    """(decoder, compiled decoder, parameters, state)."""
    decoder, params, state = Decoder.of(tiny_model().build(rngs=ax.Rngs(0)), cache=CACHE, batch_size=2, max_len=12)
    return decoder, jax.jit(decoder.__call__), params, state


def test_the_pool_of_a_decoder():
    decoder, _, state = abstract()
    assert decoder.paging == Paging(page_size=4, num_pages=7)
    assert decoder.shares_prefixes
    held = sum(array.size * array.dtype.itemsize for array in by_path(state["model"]).values())
    assert decoder.bytes_per_token == held / 28 == 2 * 2 * 2 * 4 * 4  # layers, k and v, kv heads, head_dim, float32
    assert abstract(cache=PagedCache.Config(page_size=8))[0].paging == Paging(8, 2 * 2)
    assert abstract(cache=CACHE, unstack=False)[0].bytes_per_token == decoder.bytes_per_token
    codes = abstract(cache=CACHE.set(dtype="int8"))[0]
    assert codes.bytes_per_token == 2 * 2 * 2 * (4 + 4)  # codes, and a float32 scale
    plain = abstract(cache=ContiguousCache.Config())[0]
    assert (plain.paging, plain.shares_prefixes, plain.bytes_per_token) == (None, False, 0)


def test_prefixes_are_not_shared_with_other_state_or_if_keys_depend_on_the_length():
    long = LongRoPE(short=(1.0, 1.0), long=(2.0, 2.0), original_max=8)
    cfg = ax.select(tiny_model(), Attention).set(position=Rotary.Config(scaling=long))
    decoder = abstract(cfg)[0]
    assert decoder.recompute_above and not decoder.shares_prefixes
    cfg = ax.select(tiny_model(), Attention).set(cache=ContiguousCache.Config())
    assert not abstract(cfg)[0].shares_prefixes


@pytest.mark.long
def test_short_convolutions_read_the_pages_of_another_row():
    """A row that starts within a page that another row has computed; its convolutions reach into the page before."""
    cfg = ax.select(shrunk(ax.recipe("quickstart").model), "**.conv").set(init=ax.nn.FanIn())
    cfg = ax.select(cfg, "embedding").set(init=ax.nn.Normal(stddev=1.0))
    cache = PagedCache.Config(page_size=4, num_pages=8)
    decoder, params, state = Decoder.of(cfg.build(rngs=ax.Rngs(0)), cache=cache, batch_size=2, max_len=12)
    assert decoder.shares_prefixes and not decoder.unpaged
    step, ids, slots = jax.jit(decoder.__call__), jnp.arange(1, 11)[None], jnp.arange(2)
    whole, _ = step(params, state, Step(ids, jnp.zeros(1, jnp.int32), slots=slots[:1], pages=jnp.asarray([[5, 2, 7]])))
    for shared in (4, 5, 6):
        begun = Step(ids[:, :8], jnp.zeros(1, jnp.int32), slots=slots[:1], pages=jnp.asarray([[5, 2, 7]]))
        _, held = step(params, state, begun)
        other = Step(ids[:, shared:], jnp.full(1, shared), slots=slots[1:], pages=jnp.asarray([[5, 2, 6]]))
        found, _ = step(params, held, other)
        np.testing.assert_allclose(found, whole[:, shared:], atol=1e-5)


def test_pools_of_different_sizes_raise():
    layers = ax.nn.unstacked(tiny_model())
    cfg = ax.select(layers, "decoder.layers.1.attention").set(cache=CACHE.set(num_pages=6))
    with pytest.raises(
        ax.ConfigError, match=r"layers.1.attention.cache has .*num_pages=6.*, but .*layers.0.*num_pages=7"
    ):
        abstract(cfg)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"pages": [[3, 7], [5, 1]]},
            r"Step.pages\[0, 1\] is 7, but must be a page from 0 to 6, since the row has 6 tok",
        ),
        ({"pages": [[3, 0], [-1, 1]]}, r"Step.pages\[1, 0\] is -1, but must be"),
        ({"pages": [[3], [5]]}, r"Step.pages\[0\] has 1 pages of 4 tokens, but the row has 6 tokens"),
        ({"pages": [[3, 0], [5, 3]]}, r"Step.pages\[0, 0\]: the row writes to page 3, which occurs 2 times"),
        ({"pages": [[3, 0, 2], [3, 1, 7]], "start": [4, 2]}, r"Step.pages\[1, 0\]: the row writes to page 3, which"),
    ],
    ids=["missing page", "negative page", "narrow table", "page of another row", "write to a shared page"],
)
def test_wrong_tables_raise_if_their_values_are_known(paged, changes, told):
    decoder, _, params, state = paged
    start = jnp.asarray(changes.get("start", [0, 0]))
    with pytest.raises(ax.ConfigError, match=told):
        decoder(params, state, Step(IDS, start, pages=jnp.asarray(changes["pages"])))
    with pytest.raises(ax.ConfigError, match=told):
        decoder.paging.check(changes["pages"], start, [6, 6])


@pytest.mark.parametrize("missing", [7, -1])
def test_a_row_without_a_page_for_each_token_gives_nan_and_is_not_stored(paged, missing):
    _, step, params, state = paged
    expected, _ = step(params, state, Step(IDS, START, pages=jnp.asarray(TABLE)))
    logits, after = step(params, state, Step(IDS, START, pages=jnp.asarray([[3, missing, 7], [5, 1, 7]])))
    assert np.isnan(logits[0]).all()
    np.testing.assert_array_equal(logits[1], expected[1])
    assert after["lengths"].tolist() == [0, 6]
    for array in by_path(after["model"]).values():
        written = np.asarray(array).any(axis=(1, 2, 3))
        assert written.tolist() == [page in (5, 1) for page in range(7)]


def test_shared_pages_that_are_only_read_are_valid():
    Paging(4, 7).check([[3, 0], [3, 1]], [4, 5], [2, 3])
    Paging(4, 7).check([[3, 7], [7, 7]], [0, 0], [4, 0])


def test_logits_beyond_the_table_are_nan(paged):
    _, step, params, state = paged
    expected, _ = step(params, state, Step(IDS, START, pages=jnp.asarray(TABLE)))
    logits, after = step(params, state, Step(IDS, START, pages=jnp.asarray(TABLE[:, :1])))
    np.testing.assert_allclose(logits[:, :4], expected[:, :4], rtol=0, atol=2e-6)
    assert np.isnan(logits[:, 4:]).all()
    assert after["lengths"].tolist() == [4, 4]


def test_a_small_pool_requires_tables():
    decoder, params, state = abstract(cache=CACHE.set(num_pages=5))
    with pytest.raises(ax.ConfigError, match=r"Step\.pages is None, which requires 6 pages for 2 rows of 12 tokens"):
        jax.eval_shape(decoder, params, state, Step(IDS, START))


def test_tables_without_paged_caches_raise():
    decoder, params, state = abstract(cache=ContiguousCache.Config())
    with pytest.raises(ax.ConfigError, match=r"Step\.pages is given, but the model has no paged caches"):
        jax.eval_shape(decoder, params, state, Step(IDS, START, pages=jnp.asarray(TABLE)))
