"""A small model and its reference, layer by layer in NumPy float64."""

import functools

import jax
import numpy as np

import axcore as ax
from axcore.module import abstract
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, Sequence, TransformerLayer
from axcore.train import CrossEntropy
from axcore_cross_layer_kv.groups import use_cross_layer_kv

BATCH, SEQ, VOCAB, DIM, HEADS, KV_HEADS = 2, 6, 13, 8, 4, 2
SEGMENTS = np.array([[0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]], np.int32)
POSITIONS = np.array([[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4]], np.int32)


class Stretch(ax.Layer):
    """Scales queries and keys by their position, so that a wrong position changes the result."""

    def __call__(self, q, k, query_positions, key_positions):
        return tuple(
            None if x is None else (x * (1 + at[:, :, None, None] / 4)).astype(x.dtype)
            for x, at in ((q, query_positions), (k, key_positions))
        )


LAYER = TransformerLayer.Config(
    attention=Attention.Config(num_heads=HEADS, num_kv_heads=KV_HEADS, position=Stretch.Config()),
    ffn=FeedForward.Config(hidden_dim=12),
)


def repeated(num_layers, every=None, **options):
    decoder = Repeat.Config(num_layers=num_layers, layers=LAYER, **options)
    return model(decoder, every)


def listed(num_layers, every=None):
    return model(Sequence.Config(layers=[LAYER] * num_layers), every)


def model(decoder, every=None):
    cfg = CausalLM.Config(vocab_size=VOCAB, dim=DIM, decoder=decoder)
    return use_cross_layer_kv(cfg, every=every) if every else cfg


def batch(segments=None, positions=None):
    ids = np.random.default_rng(1).integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32)
    whole = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((BATCH, SEQ), np.float32)}
    return whole if segments is None else {**whole, "segment_ids": segments, "positions": positions}


shapes = functools.cache(abstract)


def parameters(cfg, seed=0):
    """Random parameters for `cfg`."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (0.5 * random.normal(size=leaf.shape)).astype(leaf.dtype), shapes(cfg)[1])


@functools.cache
def compiled(cfg):
    fn, _, state = shapes(cfg)
    assert not jax.tree.leaves(state)

    def objective(params, batch):
        return CrossEntropy.Config().build().value(fn, params, {}, batch)

    return jax.jit(jax.value_and_grad(objective))


def loss_and_grads(cfg, params, batch):
    return jax.device_get(compiled(cfg)(params, batch))


def layers_of(params, every):
    """The parameters of each layer, first to last, of a repeated model with groups of `every`."""
    group = params["decoder"]["layers"]["layers"]
    rounds = len(group[0]["ffn_norm"]["scale"])
    return [jax.tree.map(lambda x, i=i: x[i // every], group[i % every]) for i in range(rounds * every)]


def loss(params, layers, batch, every):
    """The mean cross-entropy; the first layer of each `every` computes keys and values."""
    params, layers = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (params, layers))
    ids, targets = batch["inputs"], batch["targets"]
    places = np.arange(SEQ)
    positions = batch.get("positions", np.broadcast_to(places, ids.shape))
    allowed = np.broadcast_to(places[:, None] >= places, (BATCH, SEQ, SEQ))
    if "segment_ids" in batch:
        allowed = allowed & (batch["segment_ids"][:, :, None] == batch["segment_ids"][:, None])

    x = params["embedding"]["weight"][ids]
    for number, p in enumerate(layers):
        y, attention = _norm(x, p["attention_norm"]), p["attention"]
        if number % every == 0:
            k = _heads(y, attention["key"], KV_HEADS) * (1 + positions[:, :, None, None] / 4)
            v = _heads(y, attention["value"], KV_HEADS)
        q = _heads(y, attention["query"], HEADS) * (1 + positions[:, :, None, None] / 4)
        x = x + _attend(q, k, v, allowed) @ attention["projection"]["weight"]
        y, ffn = _norm(x, p["ffn_norm"]), p["ffn"]
        gate = y @ ffn["gate"]["weight"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ ffn["up"]["weight"])) @ ffn["down"]["weight"]
    logits = _norm(x, params["norm"]) @ params["head"]["weight"]
    log_z = np.log(np.exp(logits).sum(-1))
    return (log_z - np.take_along_axis(logits, targets[..., None], -1)[..., 0]).mean()


def _norm(x, p):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"]


def _heads(x, p, count):
    return (x @ p["weight"]).reshape(BATCH, SEQ, count, -1)


def _attend(q, k, v, allowed):
    out = np.zeros(q.shape)
    for head in range(HEADS):
        of = head // (HEADS // KV_HEADS)
        scores = np.exp(np.einsum("bsd,btd->bst", q[:, :, head], k[:, :, of]) / np.sqrt(q.shape[-1])) * allowed
        out[:, :, head] = np.einsum("bst,btd->bsd", scores / scores.sum(-1, keepdims=True), v[:, :, of])
    return out.reshape(BATCH, SEQ, -1)
