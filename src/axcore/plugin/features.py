"""`use`: a modifier that a plugin supplies, by the feature's name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from axcore.config import Config, ConfigError, Modifier, did_you_mean, parse
from axcore.plugin.offers import Feature, Offer
from axcore.plugin.recipes import current_recipe
from axcore.plugin.registry import Plugin, PluginError, registry, resolve


def use(feature: str, **options: Any) -> Modifier:
    """The modifier that attaches a feature: `axcore.use("rope", theta=500_000.0)`.

    Raises:
        PluginError: no plugin offers it (the message names the one to install), or it cannot be loaded.
        ConfigError: an option that the feature does not have.
    """
    found = registry().find(Feature, feature)
    if found is None:
        raise _missing(feature)
    plugin, offer = found
    attach = resolve(plugin, offer)
    check_options(plugin, offer, attach, options)

    def edit(cfg: Config) -> Config:
        try:
            return attach(cfg, **options)
        except ConfigError as error:
            raise ConfigError(f"feature {feature!r} ({plugin}): {error}") from error

    return Modifier(f"use:{feature} of {plugin}", edit, options)


def use_text(text: str) -> Modifier:
    """`use` from text: `feature` or `feature:key=value,key=value`. Values are typed by the feature's signature.

    Raises:
        ConfigError: the text is not of that form, or a value does not fit.
    """
    feature, _, listed = text.partition(":")
    found = registry().find(Feature, feature)
    if found is None:
        raise _missing(feature)
    attach = resolve(*found)
    known = inspect.signature(attach, eval_str=True).parameters
    options: dict[str, Any] = {}
    for assignment in split_outside_brackets(listed):
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or not key:
            raise ConfigError(f"--use takes FEATURE:KEY=VALUE,..., not {text!r}")
        hint = known[key].annotation if key in known else Any
        try:
            options[key] = parse(value, Any if hint is inspect.Parameter.empty else hint)
        except ValueError as error:
            raise ConfigError(f"option {key!r} of {feature}: {error}") from None
    return use(feature, **options)


def split_outside_brackets(text: str) -> list[str]:
    """`a=1,b=(2,3)` -> `["a=1", "b=(2,3)"]`."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece for piece in pieces if piece.strip()]


def check_options(plugin: Plugin, offer: Offer, fn: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuses options that `fn(cfg, **options)` does not take, before anything is built."""
    parameters = list(inspect.signature(fn).parameters.values())[1:]
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    parameters = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    known = [parameter.name for parameter in parameters]
    where = f"({plugin}, option of {offer.target.replace(':', '.')})"
    for name in options:
        if name not in known and not free:
            raise ConfigError(f"{offer.name} has no option {name!r}.{did_you_mean(name, known)} {where}")
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise ConfigError(f"{offer.name} needs the option {parameter.name!r} {where}")


def _missing(feature: str) -> PluginError:
    recipe = current_recipe()
    asker = f"recipe {recipe!r} uses the feature {feature!r}" if recipe else f"the feature {feature!r} was asked for"
    reason = registry().why_missing(feature)
    if reason:
        return PluginError(f"{asker}; {reason}")
    near = did_you_mean(feature, (offer.name for _, offer in registry().offers(Feature)))
    # By the naming convention; not for what looks like a slip of the pen, where it would be a guess.
    install = "" if near or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", feature) else f" pip install axcore-{feature}"
    return PluginError(f"{asker}; no installed plugin offers it.{near}{install}")
