"""Entry point of `axcore` and `python -m axcore`. Installs signal handlers before slow imports."""

from __future__ import annotations

from axcore.runtime import signals


def main() -> None:
    """Runs the command in `sys.argv` and exits with its exit code."""
    signals.install()
    from axcore.cli import main as run
    from axcore.runtime import leave

    leave(run())


if __name__ == "__main__":
    main()
