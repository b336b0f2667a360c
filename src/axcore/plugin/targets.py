"""`target`: a modifier that lays a config out on hardware that is named, by the mesh rule of a plugin."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from axcore.config import Config, ConfigError, Modifier
from axcore.plugin.faults import blaming
from axcore.plugin.offers import MeshRule
from axcore.plugin.registry import registry, resolve
from axcore.plugin.slots import guard
from axcore.plugin.states import Plugin, PluginError, ways_out

_FORM = re.compile(
    r"(?:cpu|(?:gpu|tpu)-(?P<kind>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)|(?P<trn>trn[0-9]+))"
    r"-(?P<each>[0-9]+)(?:x(?P<hosts>[0-9]+))?"
)
EXAMPLES = "cpu-8, gpu-h100-8, gpu-h100-8x4 (4 hosts of 8), tpu-v5p-512, tpu-v5e-256x4 (4 slices of 256), trn2-16x64"
_CORES_PER_DEVICE = {"v4": 2, "v5p": 2}
"""The names of these TPUs count cores, and jax sees a device in each pair."""


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """The hardware that a text such as `gpu-h100-8x4` names.

    Attributes:
        text: the text.
        platform: `cpu`, `gpu`, `tpu` or `trn`.
        kind: `h100`, `v5e`, `trn2`; empty for a CPU.
        count: devices in all, as jax counts them (for a Trainium, its chips).
        hosts: how many parts a slower network joins: hosts, or slices of a TPU.
    """

    text: str
    platform: str
    kind: str
    count: int
    hosts: int = 1

    @property
    def per_host(self) -> int:
        """Devices of one host, or of one slice of a TPU."""
        return self.count // self.hosts

    @classmethod
    def parse(cls, text: str) -> Accelerator:
        """
        Raises:
            ConfigError: the text has none of the known forms, or names no device.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(f"the target {text!r} is no accelerator; write it as one of {EXAMPLES}")
        platform, kind = text[:3], found["kind"] or found["trn"] or ""
        each, hosts = int(found["each"]), int(found["hosts"] or 1)
        cores = _CORES_PER_DEVICE.get(kind, 1) if platform == "tpu" else 1
        if each < 1 or hosts < 1 or each % cores:
            least = "an even number of cores" if cores == 2 else "at least one device and one host"
            raise ConfigError(f"the target {text!r} must name {least}; examples: {EXAMPLES}")
        return cls(text, platform, kind, each // cores * hosts, hosts)


def target(accelerator: str) -> Modifier:
    """The modifier that lays a config out for an accelerator: `axcore.target("gpu-h100-8x4")`.

    The mesh rule is that of the most specific pattern that matches the text, whichever plugin offers it.

    Raises:
        ConfigError: the text names no accelerator (see `Accelerator`).
            When the modifier is applied also: the rule refuses the config, or would remove what another plugin put in.
        PluginError: no rule is for it, two are equally specific, or the rule cannot be loaded or called, or fails.
    """
    wanted = Accelerator.parse(accelerator)
    rules = mesh_rules(accelerator)
    if not rules:
        raise _missing(accelerator)
    plugin, rule = rules[0]
    rivals = [each for each in rules if strength(each[1].pattern) == strength(rule.pattern)]
    if len(rivals) > 1:
        listed = " and ".join(f"{other.pattern} of {owner.id} ({owner})" for owner, other in rivals)
        raise PluginError(
            f"the target {accelerator!r} matches two mesh rules that are equally specific: {listed}; uninstall one, or "
            f"{ways_out(owner for owner, _ in rivals)}"
        )
    lay_out = bound(plugin, rule, wanted)

    def edit(cfg: Config) -> Config:
        with blaming(f"target {accelerator!r}, rule {rule.pattern!r} ({plugin})"):
            new = lay_out(cfg)
            if isinstance(new, Config):
                guard(plugin, cfg, new)
            return new

    return Modifier(f"target:{accelerator} of {plugin}", edit, {"rule": rule.pattern})


def mesh_rules(accelerator: str) -> list[tuple[Plugin, MeshRule]]:
    """The rules whose pattern matches, the most specific first."""
    matching = [(plugin, rule) for plugin, rule in registry().offers(MeshRule) if rule.matches(accelerator)]
    return sorted(matching, key=lambda each: strength(each[1].pattern), reverse=True)


def strength(pattern: str) -> int:
    """How specific a pattern is: the number of its literal characters."""
    return len(re.sub(r"\[!?\]?[^\]]*\]|[*?]", "", pattern))


def bound(plugin: Plugin, rule: MeshRule, accelerator: Accelerator) -> Callable[[Any], Any]:
    """The rule's function of a config, with the accelerator filled in where it asks for one."""
    fn = resolve(plugin, rule)
    try:
        signature = inspect.signature(fn)
        offered = {"accelerator": accelerator} if "accelerator" in signature.parameters else {}
        signature.bind(None, **offered)
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"the mesh rule {rule.name!r} ({plugin}) must be a function of (cfg) or of (cfg, accelerator): {error}"
        ) from None
    return functools.partial(fn, **offered)


def _missing(accelerator: str) -> PluginError:
    known = dict.fromkeys(f"{rule.pattern} ({plugin.id})" for plugin, rule in registry().offers(MeshRule))
    none = f"No plugin that is loaded brings any; {registry().advice('recipes')}"
    listed = f"Known: {', '.join(known)}" if known else none
    return PluginError(f"no mesh rule is for the target {accelerator!r}. {listed}")
