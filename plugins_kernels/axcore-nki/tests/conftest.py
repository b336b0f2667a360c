import importlib.util
import pathlib
import sys

import pytest


def _contract():
    path = pathlib.Path(__file__).with_name("contract.py")
    spec = importlib.util.spec_from_file_location("nki_contract", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["nki_contract"] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


CONTRACT = _contract()


@pytest.fixture
def nkilib(monkeypatch):
    """The contract in place of nkilib, as a mapping of kernel names to kernels."""
    modules = CONTRACT.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return {name.rpartition(".")[2]: getattr(module, name.rpartition(".")[2]) for name, module in modules.items()}


@pytest.fixture
def neuron(monkeypatch):
    """Makes attention calls ask for kernels for a logical NeuronCore of Trainium2."""
    monkeypatch.setattr("axcore.nn.attention.request.target_device", lambda: ("neuron", "NC_v3d"))
