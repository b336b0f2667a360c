"""LoRA and DoRA adapters for axcore. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axcore_lora.adapter import Adapter as Adapter
    from axcore_lora.adapter_params import adapters as adapters, load as load
    from axcore_lora.attach import use_lora as use_lora
    from axcore_lora.initial import FromAdapter as FromAdapter
    from axcore_lora.layer import DoRA as DoRA, LoRA as LoRA
    from axcore_lora.merging import Merged as Merged, merge as merge, unmerge as unmerge
    from axcore_lora.serving import LoRAAdapters as LoRAAdapters

_HOMES = {
    "adapter": ("Adapter",),
    "attach": ("use_lora",),
    "initial": ("FromAdapter",),
    "layer": ("DoRA", "LoRA"),
    "merging": ("Merged", "merge", "unmerge"),
    "adapter_params": ("adapters", "load"),
    "serving": ("LoRAAdapters",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'axcore_lora' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"axcore_lora.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
