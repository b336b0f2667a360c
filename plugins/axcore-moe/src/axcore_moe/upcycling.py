"""Mixtures of experts that start from a dense model."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

import axcore as ax
from axcore import config
from axcore.module import abstract
from axcore.nn import by_layer
from axcore.train import Initial
from axcore.train.model_folder import Forms, flat, from_parts
from axcore_moe.layer import MoE

Model = config.Config
EXPERT = re.compile(r"^(?P<block>.*)\.experts\.(?P<name>gate|up|down)(?P<bias>_bias)?$")


class Upcycled(Initial):
    """Each expert starts as a copy of the dense block (Komatsuzaki et al. 2022, arXiv 2212.05055); routers start
    afresh. With weights that sum to 1 for each token the model computes what the dense one did."""

    class Config(Initial.Config):
        source: Initial.Config
        """Where the dense model is."""
        noise: float = 0.0
        """Standard deviation of what is added to each expert's weights, as a multiple of the weights' own."""
        seed: int = 0
        """Of the noise."""
        allow_new: tuple[str, ...] = ("**.router.**",)

    config: Config

    def load(self, model: Model, params: Forms, state: Forms) -> dict[str, jax.Array]:
        """See `Initial.load`.

        Raises:
            ConfigError: the model has no mixture, or one that is no sum of copies: with a shared block, or with weights
                that do not sum to 1.
        """
        cfg = self.config
        if not cfg.noise >= 0:
            raise ax.ConfigError(f"noise must be at least 0, not {cfg.noise}")
        dense = ax.select(model, MoE).map(_dense)
        forms = flat(abstract(dense)[1])
        loaded = cfg.source.build().load(dense, forms, {})
        theirs = by_layer(dense, loaded)
        key = jax.random.key(cfg.seed)
        parts: dict[str, dict[tuple[int, ...], jax.Array]] = {}
        for number, (name, (path, index)) in enumerate(by_layer(model, params).items()):
            found = EXPERT.match(name)
            source = name if found is None else _of_block(found)
            if source not in theirs:
                continue
            where, at = theirs[source]
            part = loaded[where][at]
            if found is not None:
                copies = jnp.broadcast_to(part, (params[path].shape[len(index)], *part.shape))
                draw = jax.random.normal(jax.random.fold_in(key, number), copies.shape, copies.dtype)
                part = copies + cfg.noise * part.std() * draw if cfg.noise else copies
            parts.setdefault(path, {})[index] = part
        return {path: from_parts(each, params[path]) for path, each in parts.items()}


def _of_block(found: re.Match[str]) -> str:
    return f"{found['block']}.{found['name']}.{'bias' if found['bias'] else 'weight'}"


def _dense(path: str, mixture: Any) -> Any:
    """The block that a mixture is made of."""
    router = mixture.router
    if mixture.shared is not None:
        raise ax.ConfigError("a shared block has no counterpart in a dense model; leave it out (shared_experts=0)")
    if not getattr(router, "normalize", False) or getattr(router, "scale", 1.0) != 1.0:
        raise ax.ConfigError(f"the weights of router={router!r} do not sum to 1, so the experts' sum is not the block")
    return mixture.experts.block.set(input_dim=mixture.input_dim, dtypes=mixture.dtypes, tags=mixture.tags)
