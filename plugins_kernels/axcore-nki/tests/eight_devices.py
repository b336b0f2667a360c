"""Training steps on eight CPU devices, with the contract in place of nkilib. `test_nki.py` runs this file in a process
with these devices."""

import importlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import contract

from axcore.testing import devices

sys.modules.update(contract.modules())
importlib.import_module("axcore.nn.attention.request").target_device = lambda: ("neuron", "NC_v3d")
steps = devices._steps
