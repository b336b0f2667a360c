"""Compares the model that a published config describes with a given model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from axcore.config import REQUIRED, AxcoreError, Config, walk
from axcore.config.codec import render
from axcore.config.node import fields, shown_type, type_name
from axcore.module import Layer, abstract
from axcore.nn import (
    And,
    Attention,
    BaseAttention,
    CausalLM,
    Embedding,
    Initializer,
    LatentAttention,
    Mask,
    SameSegment,
    Stack,
    by_layer,
    layers_of,
)
from axcore.train.checkpoint.model_folder import flat
from axcore.train.checkpoint.state_layout import listed
from axcore_moe.dispatch import Dense, Dropless
from axcore_moe.exchange import Exchange
from axcore_moe.layer import MoE
from axcore_moe.router import Router, TopK

NOISE = 1e-6
"""Relative difference of numbers that were stored in float32."""
WITHOUT_EFFECT: Mapping[type[Config], frozenset[str]] = {
    Layer.Config: frozenset({"axes", "dropout", "dtypes", "head_axis", "init", "input_dim", "output_dim", "tags"}),
    CausalLM.Config: frozenset({"decoder", "future", "future_weight", "pad_vocab_to"}),
    LatentAttention.Config: frozenset({"absorb_up_to"}),
    MoE.Config: frozenset({"balance", "z_loss", "dead_expert_threshold", "dead_expert_steps"}),
    Router.Config: frozenset({"jitter"}),
}
"""Fields that do not change what a model computes in evaluation, in addition to `layout_fields`, or that are compared
in another way: widths as shapes, the decoder layer by layer."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How a model differs from the one that a published config describes.

    Attributes:
        shapes: one line for each parameter that only one of them has, or that has another shape.
        options: one line for each option that changes the output.
    """

    shapes: list[str]
    options: list[str]

    def check(self, where: str, force: bool) -> None:
        """Raises unless both compute the same.

        Args:
            force: whether options may differ.

        Raises:
            AxcoreError: lists the differences.
        """
        if self.shapes:
            raise AxcoreError(f"{where} describes a different model:{listed(self.shapes)}")
        if self.options and not force:
            raise AxcoreError(
                f"{where} describes a model with other outputs:{listed(self.options)}\nTo write the "
                f"checkpoint anyway: --force"
            )


def compared(published: Any, model: Any) -> Agreement:
    """Compares the parameters and the options of two models."""
    return Agreement(different_shapes(published, model), differences(published, model))


def different_shapes(published: Any, model: Any) -> list[str]:
    """The parameters that differ, one line each."""
    theirs, ours = _shapes(published), _shapes(model)
    return [
        _line(f"parameter {name}", str(theirs.get(name, "none")), str(ours.get(name, "none")))
        for name in theirs | ours
        if theirs.get(name) != ours.get(name)
    ]


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by name (see `by_layer`), without padding of the vocabulary and modules that only
    training uses."""
    cfg = model.set(pad_vocab_to=1, future=())
    forms = flat(abstract(cfg)[1])
    return {name: tuple(forms[path].shape[len(index) :]) for name, (path, index) in by_layer(cfg, forms).items()}


def differences(published: Any, model: Any) -> list[str]:
    """The options that differ and change the output, one line each, with their paths in the config of a trainer."""
    lines = [_line(_dotted("model", path), old, new) for path, old, new in _changes("", published, model, model.dim)]
    for path, node in walk(model.decoder):
        if isinstance(node, Stack.Config) and not node.is_sequential:
            where = _dotted("model.decoder", path)
            lines.append(f"{where}: {shown_type(type(node))} may do more than run its layers in order")
    theirs, ours = layers_of(published.decoder), layers_of(model.decoder)
    if len(theirs) != len(ours):
        return [*lines, _line("model.decoder", f"{len(theirs)} layers", f"{len(ours)} layers")]
    found: dict[tuple[str, str, str], list[int]] = {}
    for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        for change in _changes("", one.config, other.config, model.dim):
            found.setdefault(change, []).append(number)
    for (path, old, new), numbers in found.items():
        first = _dotted("model.decoder", ours[numbers[0]].config_path, path)
        lines.append(_line(f"{first} ({_numbered(numbers)})", old, new))
    return lines


def _dotted(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _line(where: str, theirs: str, ours: str) -> str:
    return f"{where}: the model has {ours}, config.json describes {theirs}"


def _numbered(numbers: list[int]) -> str:
    """The numbers of layers, such as `layers 0-2`."""
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    whole = len(numbers) > 2 and numbers == [*range(numbers[0], numbers[-1] + 1)]
    return f"layers {numbers[0]}-{numbers[-1]}" if whole else f"layers {', '.join(map(str, numbers))}"


def _changes(path: str, theirs: Any, ours: Any, dim: int) -> Iterator[tuple[str, str, str]]:
    """(path, published value, own value) wherever two values compute something else."""
    if isinstance(theirs, Config) and isinstance(ours, type(theirs)) and not isinstance(theirs, Mask):
        if type(ours) is not type(theirs):
            yield path, _type(theirs), _type(ours)
        old, new = _effective(theirs, dim), _effective(ours, dim)
        for name in new:
            yield from _changes(_dotted(path, name), old.get(name), new[name], dim)
    elif not _equal(theirs, ours):
        shown = _type if isinstance(theirs, Config) and isinstance(ours, Config) else _shown
        yield path, shown(theirs), shown(ours)


def _effective(node: Config, dim: int) -> dict[str, Any]:
    """The fields that change the output in evaluation, with the values that None stands for."""
    values = {name: value for name, value in fields(node) if not _is_skipped(node, name, value)}
    if isinstance(node, Attention.Config):
        head_dim = node.head_dim or dim // node.num_heads
        values |= {"head_dim": head_dim, "num_kv_heads": node.num_kv_heads or node.num_heads}
        values["scale"] = 1 / math.sqrt(head_dim) if node.scale is None else node.scale
        if node.position is not None and getattr(node.position, "rotary_dim", None) == head_dim:
            values["position"] = node.position.set(rotary_dim=None)
    elif isinstance(node, LatentAttention.Config):
        key_dim = node.qk_nope_head_dim + node.qk_rope_head_dim
        values["scale"] = 1 / math.sqrt(key_dim) if node.scale is None else node.scale
    elif isinstance(node, Embedding.Config):
        values["scale"] = 1.0 if node.scale is None else node.scale
    elif isinstance(node, TopK.Config):
        values["bias_rate"] = "a selection bias" if node.bias_rate is not None else None
    elif isinstance(node, MoE.Config):
        dispatch = node.dispatch
        exact = isinstance(dispatch, Dense | Dropless) or (isinstance(dispatch, Exchange) and dispatch.dropless)
        values["dispatch"] = "every token reaches its experts" if exact else node.dispatch
    if isinstance(node, BaseAttention.Config):
        masks = node.mask.masks if isinstance(node.mask, And) else (node.mask,)
        values["mask"] = frozenset(mask for mask in masks if not isinstance(mask, SameSegment))  # for packed rows only
    return values


def _is_skipped(node: Config, name: str, value: Any) -> bool:
    """Whether a field does not change the output, or `compared` finds its effect in the shapes of parameters."""
    kinds = [kind for kind in type(node).__mro__ if kind is not Config]
    if (
        isinstance(value, Initializer)
        or value is REQUIRED
        or any(name in WITHOUT_EFFECT.get(kind, ()) for kind in kinds)
    ):
        return True
    if any("layout_fields" in vars(kind) for kind in type(value).__mro__ if kind is not Config):
        return False  # the class of the value declares which part of it is layout
    return any(name in vars(kind).get("layout_fields", ()) for kind in kinds)


def _equal(one: Any, other: Any) -> bool:
    numbers = [each for each in (one, other) if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(numbers) == 2:
        return math.isclose(*numbers, rel_tol=NOISE)
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(_equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def _type(node: Config) -> str:
    return type_name(type(node))


def _shown(value: Any) -> str:
    if isinstance(value, frozenset):
        return " & ".join(sorted(map(_shown, value)))
    if isinstance(value, str):
        return value
    return repr(value) if isinstance(value, Config) else render(value)
