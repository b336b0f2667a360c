"""The default of `--step-tokens`, which `axcore serve` and `axcore bench serve` share."""

import argparse

import jax
import pytest

from axcore.cli.model import add_step_sizes, chosen_step_tokens


@pytest.mark.parametrize(("backend", "default"), [("cpu", 64), ("gpu", 512)])
def test_the_default_depends_on_the_backend(monkeypatch, backend, default):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    parser = argparse.ArgumentParser()
    add_step_sizes(parser)
    assert chosen_step_tokens(parser.parse_args([])) == default
    assert chosen_step_tokens(parser.parse_args(["--step-tokens", "96"])) == 96
    assert f"on CPUs {64}" in " ".join(parser.format_help().split())
