"""Decides which config changes a resumed run may have."""

from __future__ import annotations

from axcore.config import Config, ConfigError, Diff, diff_flat, flatten, walk


def layout_paths(cfg: Config) -> list[str]:
    """The paths of all fields that do not change the mathematics of a run; see `Config.layout_fields`."""
    return [
        f"{path}.{name}" if path else name
        for path, node in walk(cfg)
        for kind in type(node).__mro__
        for name in vars(kind).get("layout_fields", ())
    ]


def changes(old: dict[str, str], cfg: Config) -> tuple[Diff, Diff]:
    """The differences between an earlier config, as text, and this one.

    Returns:
        The changes to the mathematics (model, data, objective, optimizer, seed, ...) and all other changes (mesh,
        kernels, rematerialization, microbatches, callbacks, retention, length of the run, ...).
    """
    new, free = flatten(cfg), layout_paths(cfg)

    def is_free(path: str) -> bool:
        return any(path == start or path.startswith(f"{start}.") for start in free)

    found = diff_flat(old, new)
    return Diff(each for each in found if not is_free(each.path)), Diff(each for each in found if is_free(each.path))


def check(old: dict[str, str], cfg: Config, folder: object) -> Diff:
    """Raises if the config changes the mathematics of the run.

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
