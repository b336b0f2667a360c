"""A model family, as data: which config fields make which model, and which tensors are which parameters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from axcore.nn import layers_of
from axcore_hf.fields import Fields
from axcore_hf.transforms import Plain, Shapes, Transform

NO_EXPERT = re.compile(r"\{e\}")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which tensors are which parameters.

    Attributes:
        ours: names of parameters as `axcore.nn.by_layer` gives them; `{i}` stands for every layer.
        theirs: names of tensors; `{i}` for the layer, `{e}` for every expert.
        transform: between them.
        can_write: whether export uses it.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    transform: Transform
    can_write: bool = True


def rule(
    ours: str | Sequence[str], theirs: str | Sequence[str], transform: Transform | None = None, **more: Any
) -> Rule:
    """A `Rule`, of one name or several on either side."""

    def names(given: str | Sequence[str]) -> tuple[str, ...]:
        return (given,) if isinstance(given, str) else tuple(given)

    return Rule(names(ours), names(theirs), transform or Plain(), **more)


Rules = Callable[[Any], Sequence[Rule]]
"""(model config) -> rules. A rule holds wherever the model has all the parameters that it names; the first that fits
the tensors at hand is used."""


@dataclasses.dataclass(frozen=True)
class Family:
    """What is published under one `model_type`.

    Attributes:
        model: (fields) -> the config of the model.
        rules: see `Rules`.
        ignored: regular expressions of tensors that are no parameters.
        prefix: of the names of tensors below the head.
        defaults: what `transformers` takes for fields that are left out. Only the `text_config` of a model of several
            modalities may leave them out.
    """

    name: str
    model_types: tuple[str, ...]
    model: Callable[[Fields], Any]
    rules: Rules
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    prefix: str = "model."
    defaults: Mapping[str, Any] = MappingProxyType({})

    def without_prefix(self) -> Family:
        """The same for a checkpoint of the model without its head, as that of GPT-2 is published."""

        def rules(cfg: Any) -> Sequence[Rule]:
            return [
                dataclasses.replace(each, theirs=tuple(name.removeprefix(self.prefix) for name in each.theirs))
                for each in self.rules(cfg)
            ]

        return dataclasses.replace(self, rules=rules)

    def read_config(self, fields: Fields) -> Any:
        """The config of the model that these fields describe.

        Raises:
            ConfigError: a field is missing, or not supported.
        """
        cfg = self.model(fields)
        fields("model_type")
        fields.refuse_unread()
        return cfg


@dataclasses.dataclass(frozen=True)
class Match:
    """A rule at one place: these parameters are these tensors."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    rule: Rule
    shapes: Shapes

    def expected(self) -> dict[str, tuple[int, ...]]:
        """The shape that each tensor must have."""
        return dict(zip(self.theirs, self.rule.transform.expected(self.shapes), strict=True))


def matches(family: Family, cfg: Any, forms: Mapping[str, tuple[int, ...]]) -> Iterator[list[Match]]:
    """For each place at which rules hold, all that do, in their order.

    Args:
        cfg: the model's config.
        forms: name of each parameter (see `axcore.nn.by_layer`) -> shape.
    """
    count = len(layers_of(cfg.decoder))
    found: dict[tuple[str, ...], list[Match]] = {}
    for each in family.rules(cfg):
        numbers = range(count) if any("{i}" in name for name in (*each.ours, *each.theirs)) else (0,)
        for number in numbers:
            ours = tuple(name.replace("{i}", str(number)) for name in each.ours)
            if not all(name in forms for name in ours):
                continue
            theirs: list[str] = []
            for name in each.theirs:
                name = name.replace("{i}", str(number))
                experts = range(forms[ours[0]][0]) if NO_EXPERT.search(name) else (0,)
                theirs += [name.replace("{e}", str(expert)) for expert in experts]
            shapes = [forms[name] for name in ours]
            found.setdefault(ours, []).append(Match(ours, tuple(theirs), each, shapes))
    yield from found.values()


def choose(candidates: list[Match], names: Collection[str]) -> Match:
    """The first whose tensors are there; where none's are, the one that export writes."""
    there = (each for each in candidates if all(name in names for name in each.theirs))
    return next(there, None) or next(each for each in candidates if each.rule.can_write)
