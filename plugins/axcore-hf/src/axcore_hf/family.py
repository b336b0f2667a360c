"""A model family as data: the mapping of config fields to a model, and of tensors to parameters."""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from axcore.config import AxcoreError, ConfigError
from axcore.nn import CausalLM, layers_of
from axcore.plugin.attribution import described
from axcore_hf.fields import BOOKKEEPING, COMPUTED, Fields
from axcore_hf.transforms import Plain, Shapes, Transform

NO_EXPERT = re.compile(r"\{e\}")


@dataclasses.dataclass(frozen=True)
class Rule:
    """A mapping between tensors and parameters.

    Attributes:
        ours: names of parameters as in `axcore.nn.by_layer`; `{i}` stands for every layer.
        theirs: names of tensors; `{i}` stands for the layer, `{e}` for every expert.
        transform: converts between them.
        can_write: whether export uses the rule.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    transform: Transform
    can_write: bool = True


def rule(
    ours: str | Sequence[str], theirs: str | Sequence[str], transform: Transform | None = None, **more: Any
) -> Rule:
    """A `Rule` with one or several names on either side."""

    def names(given: str | Sequence[str]) -> tuple[str, ...]:
        return (given,) if isinstance(given, str) else tuple(given)

    return Rule(names(ours), names(theirs), transform or Plain(), **more)


Rules = Callable[[Any], Sequence[Rule]]
"""(model config) -> rules. A rule applies wherever the model has all parameters that it names. If several rules apply,
the first one whose tensors exist is used."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Models that one mapping describes.

    Attributes:
        model_types: the values of `model_type` in their configs.
        model: (fields) -> the config of the model.
        rules: see `Rules`.
        ignored: regular expressions of tensors that are not parameters.
        prefix: prefix of the names of all tensors except the head's.
        defaults: the values that `transformers` uses for absent fields. A field without a default must be present.
        no_effect: fields that may have any value, because `transformers` ignores them in this family. A field that is
            neither read nor listed here is an error.
        aliases: other names of fields.
    """

    name: str
    model_types: tuple[str, ...]
    model: Callable[[Fields], Any]
    rules: Rules
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    prefix: str = "model."
    defaults: Mapping[str, Any] = MappingProxyType({})
    no_effect: Collection[str] = ()
    aliases: Mapping[str, str] = MappingProxyType({})

    def __post_init__(self) -> None:
        for field, example in (("model", "def my_model(fields): ..."), ("rules", "fixed(RULES)")):
            if not callable(value := getattr(self, field)):
                kind = type(value).__name__
                raise ConfigError(f"Family {self.name!r}: {field} must be a function, such as {example}, not a {kind}")

    def declares(self, name: str) -> bool:
        """Whether a config of this family may have the field."""
        return name in {*self.defaults, *self.no_effect, *self.aliases, *BOOKKEEPING, *COMPUTED}

    def without_prefix(self) -> Family:
        """The same family for checkpoints whose tensor names lack the prefix, such as the published GPT-2."""

        def rules(cfg: Any) -> Sequence[Rule]:
            return [
                dataclasses.replace(each, theirs=tuple(name.removeprefix(self.prefix) for name in each.theirs))
                for each in self.rules(cfg)
            ]

        return dataclasses.replace(self, rules=rules)

    def read_config(self, fields: Fields) -> Any:
        """The config of the model that these fields describe.

        Raises:
            ConfigError: a field is missing or not supported.
            AxcoreError: the function `model` raised another error, or did not return the config of a CausalLM.
        """
        declared = Fields(
            fields.raw, fields.where, defaults=self.defaults, no_effect=self.no_effect, aliases=self.aliases
        )
        cfg = _called(self, "model", declared)
        if not isinstance(cfg, CausalLM.Config):
            kind = type(cfg).__qualname__
            raise AxcoreError(f"the function `model` of the family {self.name} returned {kind}, not a CausalLM.Config")
        declared.refuse_unread()
        return cfg


def _called(family: Family, function: str, argument: Any) -> Any:
    """The result of a function of the family. An error names the line in the family's module."""
    try:
        return getattr(family, function)(argument)
    except AxcoreError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [f" at {frame.filename}:{frame.lineno}" for frame in frames if frame.filename == frames[0].filename]
        raise AxcoreError(
            f"the function `{function}` of the family {family.name} failed{own[-1] if own else ''}: {described(error)}"
        ) from error


@dataclasses.dataclass(frozen=True)
class Match:
    """A rule applied at one place: the names of parameters and tensors."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    rule: Rule
    shapes: Shapes

    def expected(self) -> dict[str, tuple[int, ...]]:
        """The shape that each tensor must have."""
        return dict(zip(self.theirs, self.rule.transform.expected(self.shapes), strict=True))


def matches(family: Family, cfg: Any, forms: Mapping[str, tuple[int, ...]]) -> Iterator[list[Match]]:
    """Yields, for each place, the rules that apply there, in order.

    Args:
        cfg: the model's config.
        forms: the shape of each parameter, by name (see `axcore.nn.by_layer`).
    """
    count = len(layers_of(cfg.decoder))
    found: dict[tuple[str, ...], list[Match]] = {}
    for each in _called(family, "rules", cfg):
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
    """The first match whose tensors exist, or else the one that export writes."""
    there = (each for each in candidates if all(name in names for name in each.theirs))
    return next(there, None) or next(each for each in candidates if each.rule.can_write)
