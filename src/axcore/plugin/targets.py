"""`target`: the modifier that adapts a config to an accelerator with a mesh rule of a plugin."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable

from axcore.config import Config, Modifier, pipe
from axcore.plugin.accelerators import Accelerator
from axcore.plugin.offers import MeshRule
from axcore.plugin.registry import registry, resolve
from axcore.plugin.slots import guarded
from axcore.plugin.states import Plugin, PluginError, how_to_disable


def target(accelerator: str) -> Modifier:
    """The modifier that adapts a config to an accelerator: `axcore.target("gpu-h100-8x4")`.

    Applies the most specific mesh rule among the rules of all plugins; see `MeshRule.strength`.

    Raises:
        ConfigError: the text names no accelerator (see `Accelerator`). When the modifier is applied: the rule does not
            accept the config, or would replace a node of another plugin.
        PluginError: no rule matches the accelerator. When the modifier is applied: no rule matches the recipe, two are
            equally specific, or the rule cannot be loaded or called, or fails.
    """
    wanted = Accelerator.parse(accelerator)
    if not _may_match(wanted) and not (registry.refresh() and _may_match(wanted)):
        raise PluginError(f"no mesh rule matches the target {accelerator!r}. {_known(wanted, '')}")
    return _Target("target", functools.partial(_adapted, wanted), {"accelerator": accelerator})


class _Target(Modifier):
    """Edits are attributed to the rule, which is known when the modifier is applied."""

    def __call__[C: Config](self, cfg: C) -> C:
        adapted: C = self.edit(cfg)
        return adapted


def mesh_rules(accelerator: Accelerator, recipe: str) -> list[tuple[Plugin, MeshRule]]:
    """The rules that apply to a recipe on an accelerator, the most specific first.

    Args:
        recipe: its name; empty for a config that no recipe made.
    """
    rules = [(plugin, rule) for plugin, rule in registry().offers(MeshRule) if not rule.why_not(accelerator, recipe)]
    return sorted(rules, key=lambda each: each[1].strength, reverse=True)


def mesh_rule(accelerator: Accelerator, recipe: str) -> tuple[Plugin, MeshRule]:
    """The rule that `target` applies to a recipe on an accelerator: the most specific one.

    Raises:
        PluginError: no rule applies, or several are equally specific.
    """
    rules = mesh_rules(accelerator, recipe)
    if not rules:
        what = f"recipe {recipe!r}" if recipe else "config, which no recipe made,"
        raise PluginError(
            f"no mesh rule matches the {what} on the target {accelerator.text!r}. {_known(accelerator, recipe)}"
        )
    rivals = [each for each in rules if each[1].strength == rules[0][1].strength]
    if len(rivals) > 1:
        listed = " and ".join(f"{rule.name} ({rule.pattern}) of {owner.id} ({owner})" for owner, rule in rivals)
        raise PluginError(
            f"the target {accelerator.text!r} matches mesh rules that are equally specific: {listed}; "
            f"uninstall one, or set {how_to_disable(owner for owner, _ in rivals)}"
        )
    return rules[0]


def recipe_of(cfg: Config) -> str:
    """The name of the recipe that made a config; empty if no recipe did."""
    actors = (event.actor.partition(" > ")[0] for event in cfg.history() if event.action == "made")
    return next((actor.removeprefix("recipe ") for actor in actors if actor.startswith("recipe ")), "")


def _may_match(accelerator: Accelerator) -> bool:
    """Whether a rule applies to the accelerator, for some recipe."""
    rules = [dataclasses.replace(rule, recipe="*") for _, rule in registry().offers(MeshRule)]
    return any(not rule.why_not(accelerator, "") for rule in rules)


def _known(accelerator: Accelerator, recipe: str) -> str:
    """The rules, and why those whose pattern matches do not apply."""
    rules = registry().offers(MeshRule)
    near = [
        f"The rule {rule.name!r} of {plugin.id}: {reason}"
        for plugin, rule in rules
        if rule.matches(accelerator) and (reason := rule.why_not(accelerator, recipe))
    ]
    if near:
        return ". ".join(near)
    if not rules:
        return f"No loaded plugin offers mesh rules; {registry().advice('mesh-rules')}"
    return "Known: " + ", ".join(dict.fromkeys(f"{rule.pattern} ({plugin.id})" for plugin, rule in rules))


def _adapted(accelerator: Accelerator, cfg: Config) -> Config:
    plugin, rule = mesh_rule(accelerator, recipe_of(cfg))
    owner = f"target {accelerator.text!r}, rule {rule.pattern!r} ({plugin})"
    edit = guarded(plugin, owner, bound(plugin, rule, accelerator))
    return pipe(cfg, Modifier(f"target:{accelerator.text} of {plugin}", edit, {"rule": rule.name}))


def bound(plugin: Plugin, rule: MeshRule, accelerator: Accelerator) -> Callable[[Config], Config]:
    """The rule's function of a config, with the accelerator bound if it takes one."""
    fn: Callable[..., Config] = resolve(plugin, rule)
    takes = "accelerator" in inspect.signature(fn).parameters
    return functools.partial(fn, accelerator=accelerator) if takes else fn
