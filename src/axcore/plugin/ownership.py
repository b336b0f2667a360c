"""Which plugin a module belongs to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from axcore.plugin.states import CORE, Plugin, State


def claims(plugins: Collection[Plugin]) -> dict[str, list[Plugin]]:
    """Module or package -> the plugins that it, and what is below it, may belong to.

    A plugin claims the module of its entry point, those that its offers name, and the packages that hold them. It
    claims nothing of the core, nor what another plugin has in its own package.
    """
    found: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        if plugin.id != CORE:
            for name in {*_of(plugin, [other for other in plugins if other is not plugin])} - {""}:
                found.setdefault(name, []).append(plugin)
    return found


def _of(plugin: Plugin, others: Collection[Plugin]) -> Iterator[str]:
    yield from (plugin.module, plugin.package)
    for offer in plugin.offers:
        module = offer.target.partition(":")[0]
        foreign = _is_in(module, "axcore") or any(_is_in(module, other.package) for other in others)
        if _is_in(module, plugin.package) or not foreign:
            yield from (module, module.rpartition(".")[0])


def owner(module: str, claimed: Mapping[str, list[Plugin]]) -> Plugin | None:
    """The plugin with the most specific claim; None without one, and where distributions share it."""
    while module and module not in claimed:
        module = module.rpartition(".")[0]
    claimants = claimed.get(module, [])
    claimants = [plugin for plugin in claimants if plugin.state is State.LOADED] or claimants
    return claimants[0] if len({plugin.distribution for plugin in claimants}) == 1 else None


def _is_in(module: str, package: str) -> bool:
    return bool(package) and f"{module}.".startswith(f"{package}.")
