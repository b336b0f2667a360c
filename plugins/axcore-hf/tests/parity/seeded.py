"""Changed configs, and weights that depend only on the names and shapes of tensors."""

import hashlib
import zlib

import numpy as np

IDS = np.random.RandomState(1).randint(0, 32, (2, 24))
LARGEST = 1_000_000
"""Models with more parameters are not compared."""
PROJECTIONS = 6


def implementation(model_type):
    """The attention of `transformers` that is compared. Eager attention of Falcon adds the biases of ALiBi twice."""
    return "sdpa" if model_type == "falcon" else "eager"


def changed(fields, change):
    """The fields after a change: {field: []} removes a field, {field: [value]} sets it."""
    kept = {name: value for name, value in fields.items() if name not in change}
    return kept | {name: values[0] for name, values in change.items() if values}


def weights(name, shape):
    """Random weights of one tensor."""
    found = 0.3 * np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return (found + (len(shape) == 1 and "norm" in name)).astype(np.float32)


def digest(shapes):
    """A short hash of the names and shapes of all tensors."""
    text = repr(sorted((name, tuple(shape)) for name, shape in shapes.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def projections(logits):
    """Random projections of all logits. Any difference between logits shows in them."""
    flat = np.asarray(logits, np.float64).ravel()
    axes = np.random.RandomState(2).standard_normal((PROJECTIONS, flat.size)) / flat.size**0.5
    return [round(float(each), 6) for each in axes @ flat]
