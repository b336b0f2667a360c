"""The formulas in NumPy float64, written as simply as possible."""

import numpy as np


def rms_norm(x, scale, eps=1e-5):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def silu(x):
    return x / (1 + np.exp(-x))


def layer_norm(x, scale, bias=0.0, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * scale + bias


def attend(q, k, v, allowed, scale=None, softcap=None, bias=None, sinks=None):
    """Softmax attention, looping over batch, head and query.

    q [b, s, h, d]; k [b, t, n, d]; v [b, t, n, e]; allowed [b, s, t]; bias [b, h, s, t]; sinks [h].
    """
    batch, seq, heads, head_dim = q.shape
    group = heads // k.shape[2]
    scale = 1 / np.sqrt(head_dim) if scale is None else scale
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b in range(batch):
        for h in range(heads):
            for i in range(seq):
                keys, values = k[b, :, h // group], v[b, :, h // group]
                seen = [t for t in range(k.shape[1]) if allowed[b, i, t]]
                if not seen:
                    out[b, i, h] = values.mean(0)
                    continue
                scores = np.array([q[b, i, h] @ keys[t] * scale for t in seen])
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                if bias is not None:
                    scores = scores + bias[b, h, i, seen]
                weights = np.exp(scores - scores.max())
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - scores.max()))
                out[b, i, h] = (weights / total) @ values[seen]
    return out


def attention(x, p, heads, kv_heads, allowed):
    batch, seq, _ = x.shape

    def project(name, count):
        return (x @ p[name]["weight"]).reshape(batch, seq, count, -1)

    out = attend(project("query", heads), project("key", kv_heads), project("value", kv_heads), allowed)
    return out.reshape(batch, seq, -1) @ p["projection"]["weight"]


def latent_attention(x, p, heads, qk_nope_head_dim, allowed, rotate=lambda x: x, **options):
    """DeepSeek-V2, eq. 9-19; `rotate` applies the positions to features [b, s, n, qk_rope_head_dim]."""
    batch, seq, _ = x.shape

    def maps(x, name):
        return x @ p[name]["weight"] + p[name].get("bias", 0.0)

    def into_heads(x, name):
        return maps(x, name).reshape(batch, seq, heads, -1)

    source = rms_norm(maps(x, "query_down"), p["query_norm"]["scale"]) if "query_down" in p else x
    q = into_heads(source, "query_up")
    latent = rms_norm(maps(x, "kv_down"), p["kv_norm"]["scale"])
    shared = np.repeat(rotate(maps(x, "position_key")[:, :, None]), heads, axis=2)
    q = np.concatenate([q[..., :qk_nope_head_dim], rotate(q[..., qk_nope_head_dim:])], axis=-1)
    k = np.concatenate([into_heads(latent, "key_up"), shared], axis=-1)
    out = attend(q, k, into_heads(latent, "value_up"), allowed, **options)
    return maps(out.reshape(batch, seq, -1), "projection")


def feed_forward(x, p):
    return (silu(x @ p["gate"]["weight"]) * (x @ p["up"]["weight"])) @ p["down"]["weight"]


def transformer_layer(x, p, heads, kv_heads, allowed):
    x = x + attention(rms_norm(x, p["attention_norm"]["scale"]), p["attention"], heads, kv_heads, allowed)
    return x + feed_forward(rms_norm(x, p["ffn_norm"]["scale"]), p["ffn"])


def causal(batch, seq, segments=None):
    """[b, s, t]: true for keys that are not later and, if rows are packed, in the same document."""
    allowed = np.zeros((batch, seq, seq), bool)
    for b in range(batch):
        for i in range(seq):
            for t in range(i + 1):
                allowed[b, i, t] = segments is None or segments[b, i] == segments[b, t]
    return allowed


def logits(ids, p, layers, heads, kv_heads, segments=None):
    x = p["embedding"]["weight"][ids]
    allowed = causal(*ids.shape, segments)
    for layer in layers:
        x = transformer_layer(x, layer, heads, kv_heads, allowed)
    x = rms_norm(x, p["norm"]["scale"])
    return x @ (p["head"]["weight"] if "head" in p else p["embedding"]["weight"].T)


def objective(logits, targets, weights, z_loss=0.0):
    """(weighted mean cross-entropy, weighted z-loss), position by position."""
    loss = z = total = 0.0
    for index in np.ndindex(*targets.shape):
        if weights[index] == 0:
            continue
        row = logits[index]
        log_z = row.max() + np.log(np.exp(row - row.max()).sum())
        loss += weights[index] * (log_z - row[targets[index]])
        z += weights[index] * log_z**2
        total += weights[index]
    return (loss / total, z_loss * z / total) if total else (0.0, 0.0)
