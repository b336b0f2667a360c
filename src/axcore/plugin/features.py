"""`use`: the modifier that attaches an offer, by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from axcore.config import Config, ConfigError, Modifier, did_you_mean, parse
from axcore.config.codec import render
from axcore.config.types import hints
from axcore.plugin.attribution import described
from axcore.plugin.offers import OFFERS, Feature, Offer
from axcore.plugin.registry import registry, resolve
from axcore.plugin.slots import config_type, filler, guarded
from axcore.plugin.states import Plugin, PluginError, how_to_disable

ATTACHABLE = tuple(kind for kind in OFFERS.values() if kind is Feature or kind.slot)
"""The kinds of offers that `use` attaches."""

type Attach = Callable[..., Config]
"""`(cfg, **options) -> cfg`."""


def use(name: str, /, **options: object) -> Modifier:
    """The modifier that attaches an offer of a plugin: `axcore.use("rope", theta=500_000.0)`.

    A feature decides which nodes it edits. An attention kernel, KV cache, numerics, grouped matmul, optimizer or input
    source fills every slot of its kind. A callback or evaluator is added under its name to every mapping of its kind.
    Offers other than features are built from `options`, and the option `where` limits the nodes to edit. If a plugin
    offers a feature and another kind under the same name, `use` attaches the feature.

    Raises:
        PluginError: no plugin offers the name, several do, or the offer cannot be loaded. When the modifier is applied:
            the code of the plugin raised an exception other than a ConfigError.
        ConfigError: an option is unknown or missing. When the modifier is applied: no node has the slot, a value does
            not fit, or another plugin has filled the slot.
    """
    plugin, offer, attach = _find(name)
    _check_options(plugin, offer, attach, options)
    edit = guarded(plugin, f"{offer.kind} {name!r} ({plugin})", lambda cfg: attach(cfg, **options))
    return Modifier(f"use:{name} of {plugin}", edit, options)


def use_text(text: str) -> Modifier:
    """`use` from text: `name` or `name:key=value,key=value`. Values are parsed by the annotations of the options.

    Raises:
        ConfigError: the text has another form, or a value does not fit.
    """
    name, _, listed = text.partition(":")
    plugin, offer, attach = _find(name)
    known = _options(plugin, offer, attach, eval_str=bool(listed))
    return use(name, **_parsed(text, {name: option.annotation for name, option in known.items()}))


def offered(kind: type[Offer], text: str) -> Config:
    """The Config of an offer from text: `name` or `name:key=value,key=value`.

    Raises:
        PluginError: no plugin offers the name, or its target cannot be loaded.
        ConfigError: the text has another form, or a value does not fit.
    """
    name = text.partition(":")[0]
    found = registry.find(kind, name)
    if found is None:
        known = sorted({offer.name for _, offer in registry().offers(kind)})
        raise PluginError(
            f"no installed plugin offers the {kind.kind} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}"
        )
    made = config_type(*found)
    return made(**_parsed(text, hints(made)))


def _parsed(text: str, known: Mapping[str, object]) -> dict[str, object]:
    """The options in `name:key=value,...`, parsed by the annotations `known`."""
    name, _, listed = text.partition(":")
    options: dict[str, object] = {}
    for assignment in re.split(r",(?=\s*\w+\s*=)", listed) if listed else ():
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or key in options:
            raise ConfigError(f"options have the form NAME:KEY=VALUE,... with each key once, not {text!r}")
        hint = known.get(key, inspect.Parameter.empty)
        try:
            options[key] = parse(value, Any if hint is inspect.Parameter.empty else hint)
        except ValueError as error:
            raise ConfigError(f"option {key!r} of {name}: {error}") from None
    return options


def options_of(plugin: Plugin, offer: Offer) -> dict[str, str]:
    """The options that `use` takes for an offer: name -> default as text, or `""` if there is none.

    Raises:
        PluginError: its target cannot be loaded.
    """
    known = _options(plugin, offer, _attacher(plugin, offer)).values()
    return {
        each.name: "" if each.default is each.empty else render(each.default)
        for each in known
        if each.kind is not each.VAR_KEYWORD
    }


def _find(name: str) -> tuple[Plugin, Offer, Attach]:
    """The offer that `use(name)` attaches, its plugin, and the function that attaches it."""
    found = [claim for kind in ATTACHABLE if (claim := registry().find(kind, name)) is not None]
    if not found:
        if registry.refresh():
            return _find(name)
        raise _missing(name)
    plugin, offer = found[0]  # a feature comes first
    if len({plugin.id for plugin, _ in found}) > 1 or (len(found) > 1 and not isinstance(offer, Feature)):
        claims = " and ".join(f"{offer.kind} by {plugin.id} ({plugin})" for plugin, offer in found)
        choice = how_to_disable(plugin for plugin, _ in found)
        raise PluginError(f"{name!r} is ambiguous: it is offered as {claims}; set {choice}, or fill the slot yourself")
    return plugin, offer, _attacher(plugin, offer)


def _attacher(plugin: Plugin, offer: Offer) -> Attach:
    if offer.slot:
        return filler(plugin, offer)
    target: Attach = resolve(plugin, offer)
    return target


def _check_options(plugin: Plugin, offer: Offer, attach: Attach, options: Mapping[str, object]) -> None:
    """Raises ConfigError for unknown options and for missing required options, before anything is built."""
    parameters = _options(plugin, offer, attach).values()
    known = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    where = f"({plugin}, option of {offer.target.replace(':', '.')})"
    for name in options:
        if name not in known and len(known) == len(parameters):
            hint = did_you_mean(name, known) or (f" It has: {', '.join(known)}." if known else "")
            raise ConfigError(f"{offer.name} has no option {name!r}.{hint} {where}")
    for each in parameters:
        if each.name in known and each.default is each.empty and each.name not in options:
            raise ConfigError(f"{offer.name} requires the option {each.name!r} {where}")


def _options(plugin: Plugin, offer: Offer, attach: Attach, *, eval_str: bool = False) -> dict[str, inspect.Parameter]:
    """The parameters of `attach` without the first, which is the config."""
    try:
        own = {each.__name__: each for each in getattr(attach, "__type_params__", ())}  # unknown to Python 3.12.1
        return dict([*inspect.signature(attach, eval_str=eval_str, locals=own).parameters.items()][1:])
    except Exception as error:  # evaluating an annotation may raise anything
        raise PluginError(
            f"{offer.kind} {offer.name!r} ({plugin}): its options cannot be read from its signature: {described(error)}"
        ) from error


def _missing(feature: str) -> PluginError:
    if reason := registry().why_missing(feature):
        return PluginError(f"there is no feature {feature!r}: {reason}")
    near = did_you_mean(feature, (offer.name for kind in ATTACHABLE for _, offer in registry().offers(kind)))
    # Distributions are named axcore-<id> by convention. A name close to a known one is probably a typo.
    install = "" if near or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", feature) else f" pip install axcore-{feature}"
    return PluginError(f"no installed plugin offers the feature {feature!r}.{near}{install}{registry().not_loaded()}")
