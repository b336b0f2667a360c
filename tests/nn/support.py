"""Running layers with parameters from NumPy: no eager initialization, one compilation for each config and shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from axcore.module import abstract
from axcore.nn import AttentionInputs, CachedRows, Contiguous, ContiguousCache, TokenInfo
from axcore.train import CrossEntropy

shapes = functools.cache(abstract)


def parameters(cfg, seed=0, scale=0.5):
    """Random parameters with the shapes that `cfg` requires."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (scale * random.normal(size=leaf.shape)).astype(leaf.dtype), shapes(cfg)[1])


@functools.cache
def compiled(cfg, method="__call__"):
    fn, _, state = shapes(cfg)
    assert not jax.tree.leaves(state)
    return jax.jit(lambda params, args: fn(params, {}, *args, method=method)[0])


def call(cfg, params, *args, method="__call__"):
    """(output, collections) of a compiled call, on the host."""
    return jax.device_get(compiled(cfg, method)(params, args))


@functools.cache
def compiled_objective(cfg, objective):
    fn, _, state = shapes(cfg)
    assert not jax.tree.leaves(state)

    def score(params, batch):
        (loss, collections), _ = fn(params, {}, batch, method=objective.build())
        return loss.mean(), collections.weighted_losses()

    return jax.jit(score)


def score(cfg, params, batch, **fields):
    """(cross-entropy, added losses) on the host; `fields` are fields of `CrossEntropy.Config`."""
    return jax.device_get(compiled_objective(cfg, CrossEntropy.Config(**fields))(params, batch))


def minimized(cfg, **fields):
    """A function of parameters and batch: the cross-entropy plus the added losses."""
    objective = CrossEntropy.Config(**fields).build()
    return lambda params, batch: objective.value(shapes(cfg)[0], params, {}, batch)


def wide(params):
    """Parameters in float64, for a reference."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def layer_of(params, index):
    return jax.tree.map(lambda leaf: leaf[index], params)


def inputs(q, k, v, mask, query, key, **options):
    """The inputs of a kernel."""
    return AttentionInputs(q, Contiguous(k, v, key), query, mask=mask, **{"scale": q.shape[3] ** -0.5, **options})


def decoded(cfg, params, x, tokens, pieces, max_len):
    """The result of an attention layer with a cache, called for consecutive pieces [start, stop) of the rows."""
    batch, seq = x.shape[:2]
    fn, _, state = abstract(cfg.set(cache=ContiguousCache.Config(batch_size=batch, max_len=max_len)))
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
    places = np.arange(max_len, dtype=np.int32)[None]
    positions, segments = tokens.positions, tokens.segment_ids
    padded = [np.pad(each, ((0, 0), (0, max_len - seq))) for each in (positions, segments)]
    step, found = jax.jit(fn), []
    for start, stop in pieces:
        held = TokenInfo(places, *padded, np.broadcast_to(places < stop, (batch, max_len)))
        rows = CachedRows(held, np.full((batch,), stop, np.int32), phase="decode" if stop - start == 1 else "prefill")
        now = (each[:, start:stop] for each in (tokens.index, positions, segments))
        part = TokenInfo(*now, cached=rows)
        (heads, _), state = step(params, state, x[:, start:stop], part)
        found.append(heads)
    return np.concatenate(found, axis=1)
