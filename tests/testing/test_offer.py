"""The check of imports, which all suites of a plugin share."""

import subprocess

import pytest
from tests.testing.wrong import instance

from axcore.plugin import Feature
from axcore.testing import offer
from axcore.testing.offer import OfferSuite


def test_all_offers_of_a_plugin_are_imported_in_one_process(monkeypatch):
    calls = []

    def run(command, **_):
        calls.append(command[-1])
        return subprocess.CompletedProcess(command, 0, '[[], {"axcore_rope.alibi": "it starts a JAX backend"}]\n', "")

    offer._probe.cache_clear()
    monkeypatch.setattr(offer.subprocess, "run", run)
    try:
        instance(OfferSuite, kind=Feature, name="rope").test_plugin_imports_no_jax_and_starts_no_backend()
        instance(OfferSuite, kind=Feature, name="rope").test_plugin_imports_no_jax_and_starts_no_backend()
        with pytest.raises(AssertionError, match=r"importing axcore_rope\.alibi:.*: it starts a JAX backend"):
            instance(OfferSuite, kind=Feature, name="alibi").test_plugin_imports_no_jax_and_starts_no_backend()
    finally:
        offer._probe.cache_clear()
    (code,) = calls
    assert "axcore_rope.feature" in code and "axcore_rope.alibi" in code


@pytest.mark.long
def test_a_new_process_finds_backends_and_imports_that_fail(tmp_path, monkeypatch):
    (tmp_path / "thin.py").write_text("")
    (tmp_path / "heavy.py").write_text("import jax")
    (tmp_path / "computes.py").write_text("import jax.numpy as jnp\nx = jnp.ones(2)")
    (tmp_path / "broken.py").write_text("import no_such_module")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    heavy, problems = offer._probe("thin", frozenset({"heavy", "computes", "broken"}))
    assert heavy == [] and set(problems) == {"computes", "broken"}
    assert "starts a JAX backend" in problems["computes"] and "no_such_module" in problems["broken"]
    assert offer._probe("heavy", frozenset()) == (["jax"], {})
