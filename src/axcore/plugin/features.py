"""`use`: a modifier that a plugin supplies, by the name of a feature or of something that fills a slot."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from axcore.config import Config, ConfigError, Modifier, did_you_mean, parse
from axcore.config.codec import render
from axcore.plugin.faults import blaming, described
from axcore.plugin.hooks import OFFERS
from axcore.plugin.offers import Feature, Offer
from axcore.plugin.recipes import current_recipe
from axcore.plugin.registry import registry, resolve
from axcore.plugin.slots import filler, guard
from axcore.plugin.states import Plugin, PluginError, ways_out

ATTACHABLE = tuple(kind for kind in OFFERS.values() if kind is Feature or kind.slot)
"""The kinds of offers that `use` attaches."""


def use(name: str, /, **options: Any) -> Modifier:
    """The modifier that attaches what a plugin offers: `axcore.use("rope", theta=500_000.0)`.

    A feature attaches itself as its function says. An attention kernel, KV cache, numerics, optimizer, input source
    or checkpoint format goes into every slot for it, built from `options`; `where=` says which nodes instead. Where a
    plugin offers both by one name, its feature says how it is attached.

    Raises:
        PluginError: no plugin offers it (the message names the one to install), several do, or it cannot be loaded.
            When the modifier is applied also: its function raised something else than a ConfigError.
        ConfigError: an option that it does not have. When the modifier is applied also: nothing to attach to, a value
            that does not fit, or a slot that another plugin has filled.
    """
    plugin, offer, attach = _find(name)
    check_options(plugin, offer, attach, options)

    def edit(cfg: Config) -> Config:
        with blaming(f"{offer.kind} {name!r} ({plugin})"):
            new = attach(cfg, **options)
            if isinstance(new, Config):
                guard(plugin, cfg, new)
            return new

    return Modifier(f"use:{name} of {plugin}", edit, options)


def use_text(text: str) -> Modifier:
    """`use` from text: `name` or `name:key=value,key=value`. Values are typed by the feature's signature, or by the
    fields of what fills the slot.

    Raises:
        ConfigError: the text is not of that form, an option stands there twice, or a value does not fit.
    """
    name, _, listed = text.partition(":")
    plugin, offer, attach = _find(name)
    known = _parameters(plugin, offer, attach, eval_str=bool(listed))
    options: dict[str, Any] = {}
    for assignment in split_outside_brackets(listed):
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not key:
            raise ConfigError(f"--use takes FEATURE:KEY=VALUE,..., not {text!r}")
        if key in options:
            raise ConfigError(f"--use {text!r} gives the option {key!r} twice")
        hint = known[key].annotation if key in known else Any
        try:
            options[key] = parse(value, Any if hint is inspect.Parameter.empty else hint)
        except ValueError as error:
            raise ConfigError(f"option {key!r} of {name}: {error}") from None
    return use(name, **options)


def _find(name: str) -> tuple[Plugin, Offer, Callable[..., Any]]:
    """Who offers what `use(name)` attaches, and the function `(cfg, **options) -> cfg` that does it."""
    found = [claim for kind in ATTACHABLE if (claim := registry().find(kind, name)) is not None]
    if not found:
        raise _missing(name)
    plugin, offer = found[0]  # a feature comes first
    if len({plugin.id for plugin, _ in found}) > 1 or (len(found) > 1 and not isinstance(offer, Feature)):
        claims = " and ".join(f"{offer.kind} by {plugin.id} ({plugin})" for plugin, offer in found)
        choice = ways_out(plugin for plugin, _ in found)
        raise PluginError(f"{name!r} is ambiguous: it is offered as {claims}; {choice}, or set the slot itself")
    return plugin, offer, _attacher(plugin, offer)


def _attacher(plugin: Plugin, offer: Offer) -> Callable[..., Any]:
    target = resolve(plugin, offer)
    return filler(plugin, offer, target) if offer.slot else target


def options_of(plugin: Plugin, offer: Offer) -> dict[str, str]:
    """The options that `use` takes for an offer: name -> default as text, or "" where there is none.

    Raises:
        PluginError: its target cannot be loaded.
    """
    known = _parameters(plugin, offer, _attacher(plugin, offer))
    return {
        each.name: "" if each.default is each.empty else render(each.default)
        for each in [*known.values()][1:]
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }


def split_outside_brackets(text: str) -> list[str]:
    """`a=1,b=(2,3)` -> `["a=1", "b=(2,3)"]`.

    Raises:
        ConfigError: a bracket is not closed, or was not opened.
    """
    pieces, open_brackets = [""], []
    for character in text:
        if character in "([{":
            open_brackets.append(character)
        elif character in ")]}" and (open_brackets or [""]).pop() + character not in ("()", "[]", "{}"):
            raise ConfigError(f"--use: the {character!r} in {text!r} closes no bracket")
        if character == "," and not open_brackets:
            pieces.append("")
        else:
            pieces[-1] += character
    if open_brackets:
        raise ConfigError(f"--use: the {open_brackets[-1]!r} in {text!r} is not closed")
    return [piece for piece in pieces if piece.strip()]


def check_options(plugin: Plugin, offer: Offer, fn: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuses options that `fn(cfg, **options)` does not take, before anything is built."""
    parameters = list(_parameters(plugin, offer, fn).values())[1:]
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    parameters = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    known = [parameter.name for parameter in parameters]
    where = f"({plugin}, option of {offer.target.replace(':', '.')})"
    for name in options:
        if name not in known and not free:
            hint = did_you_mean(name, known) or (f" It has: {', '.join(known)}." if known else "")
            raise ConfigError(f"{offer.name} has no option {name!r}.{hint} {where}")
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise ConfigError(f"{offer.name} needs the option {parameter.name!r} {where}")


def _parameters(
    plugin: Plugin, offer: Offer, fn: Callable[..., Any], *, eval_str: bool = False
) -> Mapping[str, inspect.Parameter]:
    try:
        own = {each.__name__: each for each in getattr(fn, "__type_params__", ())}  # Python 3.12.1 does not know them
        return inspect.signature(fn, eval_str=eval_str, locals=own).parameters
    except Exception as error:  # of evaluating annotations: anything
        raise PluginError(
            f"{offer.kind} {offer.name!r} ({plugin}): its options cannot be read from its signature: {described(error)}"
        ) from error


def _missing(feature: str) -> PluginError:
    recipe = current_recipe()
    asker = f"recipe {recipe!r} uses the feature {feature!r}" if recipe else f"the feature {feature!r} was asked for"
    reason = registry().why_missing(feature)
    if reason:
        return PluginError(f"{asker}; {reason}")
    near = did_you_mean(feature, (offer.name for kind in ATTACHABLE for _, offer in registry().offers(kind)))
    # By the naming convention; not for what looks like a slip of the pen, where it would be a guess.
    install = "" if near or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", feature) else f" pip install axcore-{feature}"
    return PluginError(f"{asker}; no installed plugin offers it.{near}{install}{registry().not_loaded()}")
