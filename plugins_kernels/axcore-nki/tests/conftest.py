import importlib.util
import pathlib
import sys

import jax
import pytest


def _contract():
    path = pathlib.Path(__file__).with_name("contract.py")
    spec = importlib.util.spec_from_file_location("nki_contract", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["nki_contract"] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


CONTRACT = _contract()


ON_TRAINIUM = jax.default_backend() == "neuron"


@pytest.fixture
def nkilib(monkeypatch):
    """Puts the contract in place of nkilib, and asks for kernels for a logical NeuronCore of Trainium2. On Trainium
    (`JAX_PLATFORMS=neuron`), tests use the library itself."""
    if ON_TRAINIUM:
        return
    for name, module in CONTRACT.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("axcore.nn.attention.request.target_device", lambda: ("neuron", "NC_v3d"))


@pytest.fixture
def stand_in(nkilib):
    """The kernels of the contract, by name."""
    if ON_TRAINIUM:
        pytest.skip("tests the stand-in for nkilib")
    prefix = "nkilib.core.attention."
    return {name: getattr(sys.modules[prefix + name], name) for name in ("attention_cte", "attention_bwd")}
