"""Decides which config changes a resumed run may have."""

from __future__ import annotations

from collections.abc import Mapping, Set

from axcore.config import Config, ConfigError, Diff, diff_flat, flatten, walk


def layout_fields(cfg: Config) -> dict[str, set[str]]:
    """The `layout_fields` of each node whose class has them, by path. They do not change what the run computes."""
    found: dict[str, set[str]] = {}
    for path, node in walk(cfg):
        for kind in type(node).__mro__:
            if kind is not Config and "layout_fields" in vars(kind):
                found.setdefault(path, set()).update(vars(kind)["layout_fields"])
    return found


def is_layout(path: str, fields: Mapping[str, Set[str]]) -> bool:
    """Whether the value at a path is a layout field, which does not change what the run computes. If `fields` contains
    several nodes above the value, the innermost of them decides."""
    names = path.split(".")
    for end in range(len(names) - 1, -1, -1):
        if (listed := fields.get(".".join(names[:end]))) is not None:
            return names[end] in listed
    return False


def changes(old: dict[str, str], cfg: Config) -> tuple[Diff, Diff]:
    """The differences between an earlier config, as text, and this one.

    Returns:
        The changes to what the run computes (model, data, objective, optimizer, seed, ...) and all other changes (mesh,
        kernels, rematerialization, microbatches, callbacks, retention, length of the run, ...).
    """
    new, fields = flatten(cfg), layout_fields(cfg)
    found = diff_flat(old, new)
    free = Diff(each for each in found if is_layout(each.path, fields))
    return Diff(each for each in found if each not in free), free


def check(old: dict[str, str], cfg: Config, folder: object) -> Diff:
    """Raises if the config changes what the run computes.

    Returns:
        The allowed changes.

    Raises:
        ConfigError: lists the changes that are not allowed.
    """
    refused, allowed = changes(old, cfg)
    if refused:
        raise ConfigError(
            f"the run in {folder} cannot be resumed with this config, which changes what it computes. To start a new "
            f"run from its weights: --use run-weights:folder={folder}. Changes:\n{refused}"
        )
    return allowed
