"""Adapters by the names of their layers, independently of how the layers of a model are stacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

import axcore as ax
from axcore.config import ConfigError, has_field
from axcore.module import Tree, abstract
from axcore.nn import Linear, by_layer, edit_layers, layers_of
from axcore.train.checkpoint.model_folder import flat, like
from axcore_lora.adapter import Adapter
from axcore_lora.adapter_params import SLOT, adapters, dotted
from axcore_lora.layer import LoRA
from axcore_lora.merging import adapters_of


class LayerAdapter(NamedTuple):
    """The adapter of one linear layer.

    Attributes:
        cfg: its config, without the widths.
        arrays: its parameters, such as `a` and `b`.
    """

    cfg: LoRA.Config
    arrays: Tree


def without_adapters(model: Any) -> Any:
    """The model with empty adapter slots."""
    return ax.select(model, lambda _, node: getattr(node, SLOT, None) is not None).set(adapter=None)


class _Spot(NamedTuple):
    """The place of a linear layer in the config of a model: in the layer of this number, or outside of the stacks."""

    number: int | None
    path: str


def linears(model: Any) -> dict[str, _Spot]:
    """The linear layers of a model that can have adapters, by name, such as `decoder.0.attention.query`.

    Args:
        model: config of a model with one decoder.

    Raises:
        ConfigError: a layer has an adapter already.
    """
    chosen = [(path, node) for path, node in ax.select(model, Linear) if has_field(node, SLOT)]
    if filled := [path for path, node in chosen if getattr(node, SLOT) is not None]:
        raise ConfigError(f"model.{filled[0]} already has an adapter. Use the base model, or merge it (axcore merge)")
    paths = {path for path, _ in chosen}
    marked = ax.select(model, lambda path, _: path in paths).map(
        lambda path, node: node.set(adapter=LoRA.Config(tags=(path,)))
    )
    config_paths = {dotted(path): cfg.tags[0] for path, (cfg, _) in adapters_of(marked).items()}
    layers = {f"decoder.{place.config_path}.": place for place in layers_of(model.decoder)}
    found: dict[str, _Spot] = {}
    for name, (path, _) in by_layer(model, [f"{path}.weight" for path in config_paths]).items():
        at = config_paths[path.removesuffix(".weight")]
        above = next((each for each in layers if at.startswith(each)), None)
        number = None if above is None else int(name.split(".")[1])
        found[name.removesuffix(".weight")] = _Spot(number, at if above is None else at.removeprefix(above))
    return found


def attached(model: Any, configs: Mapping[str, LoRA.Config]) -> Any:
    """The model with adapters in some linear layers, stacked as far as its layers are equal.

    Args:
        model: config of a model without adapters.
        configs: the config of each adapter, by the name of its layer; see `linears`.

    Raises:
        ConfigError: the model has no such layer.
    """
    spots = linears(model)
    if unknown := [name for name in configs if name not in spots]:
        raise ConfigError(f"the model has no linear layer {unknown[0]}, for which there is an adapter")
    by_number: dict[int | None, dict[str, LoRA.Config]] = {}
    for name, cfg in configs.items():
        by_number.setdefault(spots[name].number, {})[spots[name].path] = cfg

    def put(node: Any, new: Mapping[str, LoRA.Config]) -> Any:
        if not new:
            return node
        return ax.select(node, lambda path, _: path in new).map(lambda path, node: node.set(adapter=new[path]))

    model = put(model, by_number.pop(None, {}))
    layers = {f"decoder.{place.config_path}" for place in layers_of(model.decoder)}
    return edit_layers(
        model, lambda path, _: path in layers, lambda path, node, number: put(node, by_number.get(number, {}))
    )


def split(adapter: Adapter) -> dict[str, LayerAdapter]:
    """The adapter of each linear layer, by name. Arrays are on the host."""
    configs = {dotted(path): cfg for path, (cfg, _) in adapters_of(adapter.cfg).items()}
    arrays = {path: np.asarray(array) for path, array in flat(adapter.params).items()}
    found: dict[str, LayerAdapter] = {}
    for name, (path, index) in by_layer(adapter.cfg, arrays).items():
        layer, _, key = name.rpartition(f".{SLOT}.")
        cfg = configs[path.rpartition(f".{SLOT}.")[0]]
        own = type(cfg)(rank=cfg.rank, alpha=cfg.alpha, dropout=cfg.dropout)
        found.setdefault(layer, LayerAdapter(own, {})).arrays[key] = arrays[path][index]
    return found


def joined(model: Any, layers: Mapping[str, LayerAdapter]) -> Adapter:
    """The adapters of a model, from those of its layers.

    Args:
        model: config of the model without adapters.
        layers: the adapter of each layer, by name.

    Raises:
        ConfigError: the model has no such layer.
    """
    cfg = attached(model, {name: each.cfg for name, each in layers.items()})
    wanted = adapters(abstract(cfg)[1])
    forms = flat(wanted)
    made = {path: np.zeros(form.shape, np.float32) for path, form in forms.items()}
    for name, (path, index) in by_layer(cfg, forms).items():
        layer, _, key = name.rpartition(f".{SLOT}.")
        made[path][index] = layers[layer].arrays[key]
    return Adapter(cfg, like(wanted, made))
