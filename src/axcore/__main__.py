"""The `axcore` command, also as `python -m axcore`. Handles signals before it imports anything that takes time."""

from __future__ import annotations

from axcore.runtime import signals


def main() -> None:
    """Runs the command of `sys.argv` and ends the process with its exit code."""
    signals.install()
    from axcore.cli import main as run
    from axcore.runtime import leave

    leave(run())


if __name__ == "__main__":
    main()
