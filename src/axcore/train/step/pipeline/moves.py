"""Moves chunks of layers between stages.

The arrays of the layers are sharded in layer order, so each stage holds consecutive layers. But chunk c of the model
runs on stage `c % stages`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped


class _Round(NamedTuple):
    """A permutation: stage s sends chunk `held[s]` of the layers that it holds, which is chunk `run[s]` of those that
    stage `to[s]` runs."""

    held: np.ndarray
    run: np.ndarray
    to: np.ndarray


def _rounds(stages: int, chunks: int) -> list[_Round]:
    """One round for each chunk of a stage. Stage s holds the chunks `s * chunks + held` of the model."""
    stage = np.arange(stages)
    shift = stage // (stages // math.gcd(stages, chunks))  # stages of different shifts would send to the same stage
    rounds = []
    for number in range(chunks):
        held = (number + shift) % chunks
        of_model = stage * chunks + held
        rounds.append(_Round(held, of_model // stages, of_model % stages))
    return rounds


def to_stages(x: Shaped[Array, "layer ..."], stages: int, chunks: int) -> Shaped[Array, "chunk layers ..."]:
    """The layers that this stage runs, given those that it holds. Runs inside a `shard_map` over `pipeline`."""
    x = x.reshape(chunks, x.shape[0] // chunks, *x.shape[1:])
    if chunks == 1:
        return x
    found = x
    for each in _rounds(stages, chunks):
        source = np.argsort(each.to)  # the stage from which each stage receives
        sent = jax.lax.dynamic_index_in_dim(x, _own(each.held), 0, keepdims=False)
        received = jax.lax.ppermute(sent, "pipeline", list(enumerate(each.to.tolist())))
        found = jax.lax.dynamic_update_index_in_dim(found, received, _own(each.run[source]), 0)
    return found


def to_layers(x: Shaped[Array, "chunk layers ..."], stages: int) -> Shaped[Array, "layer ..."]:
    """The layers that this stage holds, given those that it runs: the inverse of `to_stages`."""
    chunks = x.shape[0]
    found = x
    if chunks > 1:
        for each in _rounds(stages, chunks):
            source = np.argsort(each.to)
            sent = jax.lax.dynamic_index_in_dim(x, _own(each.run[source]), 0, keepdims=False)
            received = jax.lax.ppermute(sent, "pipeline", [(to, stage) for stage, to in enumerate(each.to.tolist())])
            found = jax.lax.dynamic_update_index_in_dim(found, received, _own(each.held), 0)
    return found.reshape(-1, *x.shape[2:])


def _own(of_stages: np.ndarray) -> Int[Array, ""]:
    """The entry of this stage."""
    return jnp.asarray(of_stages)[jax.lax.axis_index("pipeline")]
