"""Rematerialization policies: which intermediate values are kept for the backward pass, on the device or on the host,
and which are recomputed.

Layers tag values with `jax.ad_checkpoint.checkpoint_name`, and policies select values by their tags.
"""

from __future__ import annotations

import contextlib
import contextvars
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from axcore.config import Config, ConfigError, FrozenDict, type_name, walk
from axcore.config.errors import did_you_mean

Policy = Callable[..., Any]  # Any: jax returns a bool or a private class
"""The `policy` argument of `jax.checkpoint`."""

TAGS: Mapping[str, str] = FrozenDict(
    {
        "query": "queries of attention, with positions applied",
        "key": "keys of attention, with positions applied; the latents of latent attention",
        "value": "values of attention",
        "heads": "results of attention before the output projection",
        "projection": "results of attention after the output projection",
        "lse": "log-sum-exp of each query and head, if a fused attention kernel keeps it",
        "gate": "gates of feed-forward blocks and experts before the activation",
        "up": "hidden features of feed-forward blocks and experts before the product with the gate",
    }
)
"""The tags of the core and their meanings. Policies may name them for any model: tags that the model lacks have no
effect. Layers may use other tags."""


class Remat(Config):
    """Base of remat policies. This one keeps only the inputs of each layer."""

    def policy(self) -> Policy:
        """The `policy` argument of `jax.checkpoint`."""
        return jax.checkpoint_policies.nothing_saveable

    def for_layer(self, layer: Config) -> Remat | None:
        """The policy of a layer with this config; None: every intermediate value is kept for the backward pass. A stack
        calls this for each of its layers."""
        return self


class SaveMatmuls(Remat):
    """Keeps the results of matrix products without batch dimensions: projections, but not attention scores."""

    def policy(self) -> Policy:
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable


class ByTag(Remat):
    """Keeps values by their tags, and recomputes the rest.

    The fields are globs of tags, as in `save=("query", "*_scores")`. If several match a tag, `recompute` wins, then
    `offload`. A training step raises if a glob matches neither a tag in `TAGS` nor a tag of the model.
    """

    save: tuple[str, ...] = ()
    """Tags of values that stay on the device."""
    offload: tuple[str, ...] = ()
    """Tags of values that are moved to host memory, and back for the backward pass."""
    recompute: tuple[str, ...] = ()
    """Tags to exclude from the other two fields."""

    def policy(self) -> Policy:
        seen = _seen.get()
        tags = seen.setdefault(self, set()) if seen is not None else set()

        def policy(primitive: Any, *inputs: Any, **parameters: Any) -> Any:  # Any: as in jax
            if primitive.name != "name":
                return False
            tag = parameters["name"]
            tags.add(tag)
            kept, offloaded = self._keeps(tag)
            select = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[tag] if kept else [],
                names_which_can_be_offloaded=[tag] if offloaded else [],
                offload_src="device",
                offload_dst="pinned_host",
            )
            return select(primitive, *inputs, **parameters)

        return policy

    def _keeps(self, tag: str) -> tuple[bool, bool]:
        """Whether values with this tag are saved on the device, and whether they are offloaded."""
        if _matches(tag, self.recompute):
            return False, False
        offloaded = _matches(tag, self.offload)
        return not offloaded and _matches(tag, self.save), offloaded


class ByKind(Remat):
    """A policy for each class of layer, as in `ByKind(kinds={"MoE": Remat()}, others=ByTag(save=("heads",)))`.

    The keys are class names. A layer gets the policy of the first key that names its own class or the class of a layer
    inside it. A policy that is None keeps every intermediate value.
    """

    kinds: Mapping[str, Remat | None]
    others: Remat | None = None
    """The policy of layers that no key names."""

    def policy(self) -> Policy:
        raise ConfigError("ByKind has a policy for each kind of layer. A stack must call `for_layer(layer)` first")

    def for_layer(self, layer: Config) -> Remat | None:
        names = _kinds(layer)
        remat = next((remat for name, remat in self.kinds.items() if name in names), self.others)
        return None if remat is None else remat.for_layer(layer)


def check_kinds(model: Config, where: str) -> None:
    """Checks that each key of each `ByKind` in a model names a class of the stack that has the policy.

    Args:
        where: the path of the model, for messages.

    Raises:
        ConfigError: A key names another class.
    """
    for path, node in walk(model):
        remat = getattr(node, "remat", None)
        if isinstance(remat, ByKind):
            names = sorted(_kinds(node))
            for name in remat.kinds:
                if name not in names:
                    raise ConfigError(
                        f"{where}.{path}.remat.kinds: the stack contains no {name!r}.{did_you_mean(name, names)} "
                        f"Known: {', '.join(names)}"
                    )


@contextlib.contextmanager
def checked_tags() -> Iterator[None]:
    """Checks the globs of every `ByTag` that is applied while the block traces a gradient.

    Raises:
        ConfigError: At the end of the block: a glob matches neither a tag in `TAGS` nor a tag of the traced layers.
    """
    token = _seen.set({})
    try:
        yield
        for remat, tags in (_seen.get() or {}).items():
            known = sorted({*tags, *TAGS})
            for pattern in (*remat.save, *remat.offload, *remat.recompute):
                if not fnmatch.filter(known, pattern):
                    own = ", ".join(sorted(tags)) or "none"
                    raise ConfigError(
                        f"remat={remat!r}: no value is tagged {pattern!r}.{did_you_mean(pattern, known)} "
                        f"Tags of the layers: {own}. Tags of the core: {', '.join(TAGS)}"
                    )
    finally:
        _seen.reset(token)


_seen: contextvars.ContextVar[dict[ByTag, set[str]] | None] = contextvars.ContextVar("axcore_tags", default=None)
"""The tags to which each policy was applied in the enclosing `checked_tags` block."""


def _matches(tag: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(tag, pattern) for pattern in patterns)


def _kinds(cfg: Config) -> set[str]:
    """The names of the classes of a config and of the configs inside it."""
    return {type_name(type(node)).rpartition(".")[2] for _, node in walk(cfg)}
