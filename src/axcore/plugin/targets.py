"""`target`: the modifier that adapts a config to an accelerator with a mesh rule of a plugin."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable

from axcore.config import Config, Modifier
from axcore.plugin.accelerators import Accelerator
from axcore.plugin.offers import MeshRule
from axcore.plugin.registry import registry, resolve
from axcore.plugin.slots import guarded
from axcore.plugin.states import Plugin, PluginError, how_to_disable


def target(accelerator: str) -> Modifier:
    """The modifier that adapts a config to an accelerator: `axcore.target("gpu-h100-8x4")`.

    Applies the mesh rule with the most specific matching pattern among the rules of all plugins.

    Raises:
        ConfigError: the text names no accelerator (see `Accelerator`). When the modifier is applied: the rule does not
            accept the config, or would replace a node of another plugin.
        PluginError: no rule matches, two are equally specific, or the rule cannot be loaded or called, or fails.
    """
    wanted = Accelerator.parse(accelerator)
    rules = mesh_rules(accelerator)
    if not rules and registry.refresh():
        rules = mesh_rules(accelerator)
    if not rules:
        known = dict.fromkeys(f"{rule.pattern} ({plugin.id})" for plugin, rule in registry().offers(MeshRule))
        none = f"No loaded plugin offers mesh rules; {registry().advice('recipes')}"
        listed = f"Known: {', '.join(known)}" if known else none
        raise PluginError(f"no mesh rule matches the target {accelerator!r}. {listed}")
    plugin, rule = rules[0]
    rivals = [each for each in rules if strength(each[1].pattern) == strength(rule.pattern)]
    if len(rivals) > 1:
        listed = " and ".join(f"{other.pattern} of {owner.id} ({owner})" for owner, other in rivals)
        raise PluginError(
            f"the target {accelerator!r} matches two mesh rules that are equally specific: {listed}; uninstall one, or "
            f"set {how_to_disable(owner for owner, _ in rivals)}"
        )
    owner = f"target {accelerator!r}, rule {rule.pattern!r} ({plugin})"
    edit = guarded(plugin, owner, bound(plugin, rule, wanted))
    return Modifier(f"target:{accelerator} of {plugin}", edit, {"rule": rule.pattern})


def mesh_rules(accelerator: str) -> list[tuple[Plugin, MeshRule]]:
    """The rules whose pattern matches, the most specific first."""
    matching = [(plugin, rule) for plugin, rule in registry().offers(MeshRule) if rule.matches(accelerator)]
    return sorted(matching, key=lambda each: strength(each[1].pattern), reverse=True)


def strength(pattern: str) -> int:
    """How specific a pattern is: the number of its literal characters."""
    return len(re.sub(r"\[!?\]?[^\]]*\]|[*?]", "", pattern))


def bound(plugin: Plugin, rule: MeshRule, accelerator: Accelerator) -> Callable[[Config], Config]:
    """The rule's function of a config, with the accelerator bound if it takes one."""
    fn: Callable[..., Config] = resolve(plugin, rule)
    takes = "accelerator" in inspect.signature(fn).parameters
    return functools.partial(fn, accelerator=accelerator) if takes else fn
