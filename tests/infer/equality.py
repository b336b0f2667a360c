"""Models with everything that keeps decoding state, and engines of them for comparison with full recomputation."""

import functools

import jax
import numpy as np

import axcore as ax
from axcore.infer import Engine
from axcore.module import abstract
from axcore.nn import Attention, ContiguousCache, LatentAttention, TransformerLayer, without_caches
from axcore.testing.models import tiny_model
from axcore_lora import merge
from axcore_paged_kv.cache import PagedCache
from axcore_recipes.short_conv import ConvTransformerLayer, ShortConv

WINDOW, PAGE, STEP, MAX_LEN, ROWS, PAGES = 6, 4, 16, 32, 3, 9
"""Two rows of `MAX_LEN` tokens do not fit into the pages, so rows are preempted."""
CACHES = {
    "contiguous": ContiguousCache.Config(),
    "paged": PagedCache.Config(page_size=PAGE, num_pages=PAGES),
}


def _latent(cfg):
    attention = LatentAttention.Config(
        num_heads=4, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, value_dim=3, absorb_up_to=2
    )
    return ax.select(cfg, Attention).map(lambda _, __: attention)


def _convolved(cfg):
    """With short convolutions, which keep the last inputs of a row, or those of pages."""

    def convolved(_, layer):
        conv = ShortConv.Config(init=ax.nn.Normal(stddev=0.5))
        return ConvTransformerLayer.Config(attention=layer.attention, ffn=layer.ffn, conv=conv)

    return ax.select(cfg, TransformerLayer).map(convolved)


MODELS = {
    "mixture, windows": (4, ax.use("sliding-window", size=WINDOW, global_every=2), ax.use("moe", num_experts=4)),
    "rings": (4, ax.use("sliding-window", size=WINDOW, global_every=2), ax.use("ring-kv", spare=2)),
    "Mamba-2": (2, ax.use("mamba2", attention_every=2, head_dim=8, state_dim=8, chunk=4, conv_width=3)),
    "cross-layer KV, LoRA": (4, ax.use("cross-layer-kv", every=2), ax.use("lora", rank=2, alpha=2.0)),
    "differential": (2, ax.use("diff-attention")),
    "latent": (2, _latent),
    "short convolutions": (2, _convolved),
}
"""Name -> the number of layers, and what is attached to the tiny model."""
HAVE_SLOTS = ("rings", "Mamba-2")
"""Models with state that is not in pages."""


@functools.cache
def built(name):
    """(the model as it is trained, the model of the engine). They differ in that LoRA is merged into the weights, and
    that the first has no caches."""
    num_layers, *features = MODELS[name]
    cfg = ax.select(tiny_model(), "embedding").set(init=ax.nn.Normal(stddev=1.0))
    cfg = ax.pipe(ax.select(cfg, "decoder").set(num_layers=num_layers), ax.use("rope"), *features)
    fn, params, state = ax.functional(cfg.build(rngs=ax.Rngs(0)))
    if "LoRA" in name:  # new adapters are zero
        noise = np.random.default_rng(1)
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: x + 0.3 * noise.normal(size=x.shape).astype(x.dtype) * (path[-1].key == "b"), params
        )
    trained = abstract(without_caches(cfg))[0].bind(params, state)
    if "LoRA" not in name:
        return trained, fn.bind(params, state)
    merged = merge(cfg, params)
    return trained, abstract(merged.cfg)[0].bind(merged.params, state)


@functools.cache
def recomputed(name):
    """A function of a row of at most `MAX_LEN` tokens: the log-probabilities [tokens, vocab] of the next token."""
    fn, params, state = ax.functional(built(name)[0])
    logprobs = jax.jit(lambda row: jax.nn.log_softmax(fn(params, state, row[None])[0][0][0]))

    def of(ids):
        row = np.zeros(MAX_LEN, np.int32)
        row[: len(ids)] = ids
        return np.asarray(logprobs(row))[: len(ids)]

    return of


def engine(name, cache):
    """An engine, to be closed."""
    states = 2 if cache == "paged" and name in HAVE_SLOTS else 0
    cfg = Engine.Config(max_len=MAX_LEN, max_rows=ROWS, step_tokens=STEP, cache=CACHES[cache], prefix_states=states)
    return cfg.build(built(name)[1])
