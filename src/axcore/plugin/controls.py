"""The environment variables that exclude plugins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from axcore.config import did_you_mean
from axcore.plugin.allowlist import VARIABLE as ALLOWLIST, Allowlist
from axcore.plugin.states import CORE, Plugin, PluginError

VARIABLES = ("AXCORE_DISABLE", "AXCORE_PLUGINS", ALLOWLIST, "AXCORE_STRICT")


class Controls:
    """Which plugins may be loaded. The built-in offers are always loaded.

    - AXCORE_DISABLE: comma-separated ids of plugins to exclude.
    - AXCORE_PLUGINS: comma-separated ids of the only plugins to load.
    - AXCORE_ALLOWLIST: a file. Plugins that it does not list, or whose files have changed, are excluded.
    - AXCORE_STRICT=1: discovery raises if a plugin is broken or two plugins conflict.

    Raises:
        PluginError: a variable names a plugin that is not installed, or a file that cannot be read, or has an invalid
            value.
    """

    def __init__(self, environ: Mapping[str, str], known: Mapping[str, Plugin]):
        self.disabled, only = _ids(environ, "AXCORE_DISABLE", known), _ids(environ, "AXCORE_PLUGINS", known)
        self.only = only if "AXCORE_PLUGINS" in environ else None
        if CORE in self.disabled:
            raise PluginError(f"AXCORE_DISABLE names {CORE!r}, which is axcore itself and cannot be disabled")
        if (strict := environ.get("AXCORE_STRICT", "0")) not in ("0", "1"):
            raise PluginError(f"AXCORE_STRICT must be 0 or 1, not {strict!r}")
        self.strict = strict == "1"
        self.allowlist = Allowlist.read(Path(environ[ALLOWLIST])) if ALLOWLIST in environ else None

    def why_disabled(self, plugin: Plugin) -> str:
        """Why a plugin is excluded; `""` if it is not."""
        if plugin.id == CORE:
            return ""
        if plugin.id in self.disabled:
            return "by AXCORE_DISABLE"
        if self.only is not None and plugin.id not in self.only:
            return "by AXCORE_PLUGINS" if self.only else "by AXCORE_PLUGINS, which is set and empty"
        refused = self.allowlist.why_refused(plugin) if self.allowlist else ""
        return refused and f"by {ALLOWLIST}: {refused}"


def _ids(environ: Mapping[str, str], variable: str, known: Mapping[str, Plugin]) -> frozenset[str]:
    ids = {part.strip() for part in environ.get(variable, "").split(",") if part.strip()}
    for unknown in sorted(ids - set(known)):
        same = [f" Did you mean {plugin.id!r}?" for plugin in known.values() if plugin.distribution == unknown]
        hint = same[0] if same else did_you_mean(unknown, known)
        raise PluginError(f"{variable} names {unknown!r}, which is not the id of an installed plugin.{hint}")
    return frozenset(ids)
