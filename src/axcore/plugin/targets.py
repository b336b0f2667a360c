"""`target`: the modifier that adapts a config to an accelerator with a mesh rule of a plugin."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable

from axcore.config import Config, ConfigError, Modifier
from axcore.plugin.offers import MeshRule
from axcore.plugin.registry import registry, resolve
from axcore.plugin.slots import guarded
from axcore.plugin.states import Plugin, PluginError, how_to_disable

_FORM = re.compile(
    r"(?:cpu|(?:gpu|tpu)-(?P<kind>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)|(?P<trn>trn[0-9]+))"
    r"-(?P<each>[0-9]+)(?:x(?P<hosts>[0-9]+))?"
)
EXAMPLES = "cpu-8, gpu-h100-8, gpu-h100-8x4 (4 hosts of 8), tpu-v5p-512, tpu-v5e-256x4 (4 slices of 256), trn2-16x64"
_CORES_PER_DEVICE = {"v4": 2, "v5p": 2}
"""TPUs whose names count cores instead of jax devices, and the number of cores per device."""


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """The hardware that a text such as `gpu-h100-8x4` names.

    Attributes:
        platform: `cpu`, `gpu`, `tpu` or `trn`.
        kind: `h100`, `v5e`, `trn2`; empty for a CPU.
        count: the total number of jax devices; for a Trainium, the number of chips.
        hosts: the number of hosts, or of slices of a TPU. A slower network connects them.
    """

    text: str
    platform: str
    kind: str
    count: int
    hosts: int = 1

    @property
    def per_host(self) -> int:
        """Devices per host, or per slice of a TPU."""
        return self.count // self.hosts

    @classmethod
    def parse(cls, text: str) -> Accelerator:
        """
        Raises:
            ConfigError: the text has none of the known forms, or names no device.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(f"the target {text!r} is not an accelerator; examples: {EXAMPLES}")
        platform, kind = text[:3], found["kind"] or found["trn"] or ""
        each, hosts = int(found["each"]), int(found["hosts"] or 1)
        cores = _CORES_PER_DEVICE.get(kind, 1) if platform == "tpu" else 1
        if each < 1 or hosts < 1 or each % cores:
            least = "an even number of cores" if cores == 2 else "at least one device and one host"
            raise ConfigError(f"the target {text!r} must name {least}; examples: {EXAMPLES}")
        return cls(text, platform, kind, each // cores * hosts, hosts)


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
